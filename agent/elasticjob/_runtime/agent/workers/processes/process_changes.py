"""Waiting for conditions that change when a process ends or reports something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

POLL_INTERVAL = 0.01
"""Poll interval for the two things the kernel does not notify, in seconds: a program that finished loading, and
grandchildren of an exiting worker."""


class ProcessChanges:
    """Wakes the tasks that wait for a condition about processes."""

    def __init__(self) -> None:
        self.must_poll: Callable[[], bool] = lambda: False
        """Whether something is waited for that nothing reports."""
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Let each `until` evaluate its condition."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait up to `seconds` for a condition; return whether it holds. It is evaluated again after each `notify`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition():
            left = deadline - loop.time()
            if left <= 0:
                return False
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                timeout = min(left, POLL_INTERVAL) if self.must_poll() else left
                await asyncio.wait_for(self._changed.wait(), timeout)
        return True
