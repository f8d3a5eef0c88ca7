"""Set-up of all tests."""

from __future__ import annotations

import signal

# A shell starts background processes with both ignored, and the processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
