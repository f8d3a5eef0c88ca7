"""Detect the exit of a worker early: waitpid returns only after the kernel has freed its memory (0.1 s per GB).

A worker holds a robust mutex for as long as it lives (`system.robust_mutex`). The kernel releases it first, and frees
the memory later.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elasticjob._runtime.agent.processes import exit_of
from elasticjob._runtime.system.robust_mutex import HeldMutex

POLL_DELAYS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds before each check of a process that has released its mutex. Usually all its threads end within a moment. But
the mutex is also released by a process that executes another program, or whose first thread alone has ended: such a
process stays, and nothing is reported."""


class FastExits:
    """One thread for each watched process, which sleeps until the process releases its mutex."""

    def __init__(self, on_exit: Callable[[int, int], None]) -> None:
        """`on_exit`: called in the event loop with the process id and the exit code, as of `processes.reap`.

        Not called if the process turns out to be alive, if `forget` was called, or if /proc does not show the exit: the
        process is then reaped as usual. An exit code of 0 may also mean that the code is unknown.
        """
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, HeldMutex] = {}

    def watch(self, pid: int, mutex: HeldMutex) -> None:
        """Watch a child of this process."""
        self._watched[pid] = mutex
        threading.Thread(target=self._wait, args=(pid, mutex), daemon=True, name=f"exit-of-{pid}").start()

    def forget(self, pid: int) -> None:
        """Stop watching this process: it has been reaped, and another process may get its id."""
        self._watched.pop(pid, None)

    def _wait(self, pid: int, mutex: HeldMutex) -> None:
        if not mutex.wait(pid):
            return
        for seconds in POLL_DELAYS:
            time.sleep(seconds)
            if (code := exit_of(pid)) is not None:
                with suppress(RuntimeError):  # the event loop is closed: the agent exits
                    self._loop.call_soon_threadsafe(self._report, pid, mutex, code)
                return

    def _report(self, pid: int, mutex: HeldMutex, code: int) -> None:
        if self._watched.get(pid) is mutex:
            del self._watched[pid]
            self._on_exit(pid, code)
