"""End gloo backends in threads: those of gloo wake up each 10 ms only, and the next round forms in the meantime."""

from __future__ import annotations

import atexit
import threading
from typing import Any

_END_TIMEOUT = 5.0
"""Seconds that the end of the process waits for threads of gloo. One that hangs does not end by waiting."""


_ending: list[threading.Thread] = []
"""Threads that end gloo backends."""


def end_in_background(gloo: list[Any]) -> None:
    _ending[:] = filter(threading.Thread.is_alive, _ending)
    _ending.append(threading.Thread(target=gloo.clear, daemon=True, name="end-of-gloo"))
    _ending[-1].start()


@atexit.register
def _wait_for_ends() -> None:
    """Python stops the threads that are left when it ends, and one that is in C++ code then aborts the process."""
    for thread in _ending:
        thread.join(_END_TIMEOUT)
