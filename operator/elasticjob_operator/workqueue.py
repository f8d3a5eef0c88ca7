"""A keyed work queue: one pending and one running look per key, whatever number of doorbells rang.

`Schedule` decides and knows no clock; `run` waits and carries out.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 60.0


class Schedule(Generic[K]):
    """Which key is due when. Times are any clock's seconds."""

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)) -> None:  # noqa: S311
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._running: set[K] = set()
        self._failures: dict[K, int] = {}
        self._count = 0
        self._jitter = jitter

    def __len__(self) -> int:
        return len(self._due)

    def enqueue(self, key: K, at: float) -> None:
        """Have `key` looked at, at `at` or before. While it is being looked at, it is looked at again after that."""
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))

    def next_due(self) -> float | None:
        """When `take` can give a key; None: not before something is poked or done."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> K | None:
        """A key that is due and not running; it runs until `done`."""
        due = self.next_due()
        if due is None or due > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._running.add(key)
        return key

    def done(self, key: K, now: float, *, again_after: float | None = None, failed: bool = False) -> None:
        """The look has ended. A failed one is repeated with growing delay."""
        self._running.discard(key)
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            again_after = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (count - 1)) * self._jitter()
        else:
            self._failures.pop(key, None)
        if again_after is not None:
            self.enqueue(key, now + again_after)
        if key in self._due:
            self._count += 1
            heapq.heappush(self._heap, (self._due[key], self._count, key))

    def oldest_wait(self, now: float) -> float:
        """For how long the longest waiting key is overdue."""
        return max((now - due for due in self._due.values()), default=0.0)

    def forget(self, key: K) -> None:
        """Its failures and its next look do not matter any more."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    def _drop_stale(self) -> None:
        """Entries that were moved, or whose key runs: `done` pushes those again."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at and key not in self._running:
                return
            heapq.heappop(self._heap)


class WorkQueue(Generic[K]):
    """Workers that look at due keys. `look` returns after how many seconds to look again, or None."""

    def __init__(
        self, look: Callable[[K], Awaitable[float | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._clock = clock
        self._schedule: Schedule[K] = Schedule()
        self._event = asyncio.Event()

    def __len__(self) -> int:
        return len(self._schedule)

    def enqueue(self, key: K, after: float = 0.0) -> None:
        """Have `key` looked at within `after` seconds."""
        self._schedule.enqueue(key, self._clock() + after)
        self._event.set()

    def forget(self, key: K) -> None:
        self._schedule.forget(key)

    def oldest_wait(self) -> float:
        return self._schedule.oldest_wait(self._clock())

    async def run(self, workers: int) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            free = asyncio.Semaphore(workers)
            while True:
                key = await self._take()
                await free.acquire()
                group.create_task(self._work(key, free))

    async def _take(self) -> K:
        while True:
            self._event.clear()
            now = self._clock()
            key = self._schedule.take(now)
            if key is not None:
                return key
            # Not wait_for: until Python 3.12 it swallows a cancellation that comes together with the event.
            due, timer = self._schedule.next_due(), None
            if due is not None:
                timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._event.set)
            try:
                await self._event.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _work(self, key: K, free: asyncio.Semaphore) -> None:
        again: float | None = None
        failed = False
        try:
            again = await self._look(key)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Whatever it was, it is this key's alone: it is tried again later, and others go on.
            log.warning("%s: %s: %s", key, type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
            failed = True
        finally:
            free.release()
        self._schedule.done(key, self._clock(), again_after=again, failed=failed)
        self._event.set()
