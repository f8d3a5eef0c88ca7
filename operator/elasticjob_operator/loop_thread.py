"""An event loop in a thread of its own, for work that a busy event loop must not delay."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from elasticjob._runtime.system.daemon_threads import DaemonExecutor

T = TypeVar("T")

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""Seconds that cancelled coroutines have to end when the thread is closed."""


class LoopThread:
    """Runs coroutines in a thread that does nothing else, until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor())
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result. A cancellation of this call cancels the coroutine, and does not wait for its
        end; a coroutine that is given to the thread later begins after the cancellation."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def begin(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run the coroutine in the thread, until it ends or `close` is called."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).add_done_callback(self._log_error)

    def _log_error(self, ended: Future[object]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.critical("the thread %s does its work no more", self._thread.name, exc_info=error)

    async def close(self) -> None:
        """Cancel the coroutines that still run, and end the thread."""
        await self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_SECONDS)


class LoopSilence:
    """Measures, from another thread, for how long an event loop has not answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._asked: float | None = None
        """When the loop was asked for the answer that it still owes; None: it owes none."""

    def seconds(self) -> float:
        """Return for how many seconds the loop has owed an answer, and ask for one if it owes none."""
        asked = self._asked
        if asked is not None:
            return self._clock() - asked
        self._asked = self._clock()
        self._loop.call_soon_threadsafe(self._answer)
        return 0.0

    def _answer(self) -> None:
        self._asked = None
