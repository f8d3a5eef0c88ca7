"""What holds for all tests."""

from __future__ import annotations

import signal

# Started in the background by a shell, this process ignores SIGINT, and all that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
