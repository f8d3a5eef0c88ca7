"""Whether the main thread makes progress.

Without `ping`, running any Python code is progress: a pending call of the interpreter, which only the main thread runs,
notes the time. From the first `ping` in an iteration on, only further ones are progress.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from elasticjob.inprocess._threads.own_thread import MonitorOfWorker

_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class ProgressWatchdog:
    """Notes the last progress of the main thread and reports it to the monitor process."""

    def __init__(self, report: Callable[[], None], interval: timedelta) -> None:
        """`report` is called after each `interval` with progress, in a thread of its own."""
        self._report = report
        self._interval = interval.total_seconds()
        self._manual = False
        self.last_progress = time.monotonic()
        self._shut_down = threading.Event()
        self.pending = False
        # Objects that a pending call refers to must exist when it runs.
        self._pending_call = _PENDING_CALL(self.run_pending_call)
        self._thread = MonitorOfWorker(self._run, "progress-watchdog")

    def start(self) -> None:
        self._thread.start()

    def ping(self) -> None:
        """Note progress. From now on, until the next `reset`, only calls of this are progress."""
        self.last_progress = time.monotonic()
        self._manual = True

    def reset(self) -> None:
        """Note progress, and count any Python code as progress from now on."""
        self._manual = False
        self.last_progress = time.monotonic()

    def age(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self.last_progress

    @property
    def is_manual(self) -> bool:
        """Whether there was a `ping` since the last `reset`."""
        return self._manual

    def shutdown(self) -> None:
        """End the thread, and wait for a pending call to be over."""
        self._shut_down.set()
        if self._thread.is_alive():
            self._thread.join()
        if threading.current_thread() is threading.main_thread():
            while self.pending:
                time.sleep(0)  # pending calls run between two steps of the interpreter

    def _run(self) -> None:
        reported = 0.0
        while not self._shut_down.wait(self._interval):
            if not self._manual and not self.pending:
                self.pending = True
                if ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None):  # the interpreter's queue is full
                    self.pending = False
            if self.last_progress > reported:
                reported = self.last_progress
                self._report()

    def run_pending_call(self, _: object) -> int:
        self.pending = False
        if not self._manual:
            self.last_progress = time.monotonic()
        return 0
