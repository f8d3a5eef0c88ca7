"""Learn that a process exits before the kernel has freed its memory, which waitpid waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elasticjob._runtime.agent.processes import exit_of
from elasticjob._runtime.system.robust_mutex import HeldMutex

_LOOKS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds before each look at a process whose mutex was released: all its threads end soon, or it goes on. It executes
another program then, or only its first thread has ended."""


class EarlyExits:
    """One thread for each watched process, which sleeps until the process releases its mutex."""

    def __init__(self, on_exit: Callable[[int, int], None]) -> None:
        """`on_exit`: called in the event loop with the process id and the exit code, as of `processes.reap`.

        It is called for no process that goes on, that `forget` was called for, or of which only waitpid will tell. The
        code is 0 if it is unknown.
        """
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, HeldMutex] = {}

    def watch(self, pid: int, mutex: HeldMutex) -> None:
        """Watch a child of this process."""
        self._watched[pid] = mutex
        threading.Thread(target=self._wait, args=(pid, mutex), daemon=True, name=f"exit-of-{pid}").start()

    def forget(self, pid: int) -> None:
        """Call `on_exit` for this process no more: it has been reaped, and another one may get its id."""
        self._watched.pop(pid, None)

    def _wait(self, pid: int, mutex: HeldMutex) -> None:
        if not mutex.wait(pid):
            return
        for seconds in _LOOKS:
            time.sleep(seconds)
            if (code := exit_of(pid)) is not None:
                with suppress(RuntimeError):  # the event loop is closed: the agent exits
                    self._loop.call_soon_threadsafe(self._report, pid, mutex, code)
                return

    def _report(self, pid: int, mutex: HeldMutex, code: int) -> None:
        if self._watched.get(pid) is mutex:
            del self._watched[pid]
            self._on_exit(pid, code)
