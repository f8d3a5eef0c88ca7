"""Set-up of all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A shell starts background processes with both ignored, and the processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Time is no property: a busy machine pauses a process for longer than hypothesis allows for one example.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
