"""A keyed work queue: however often a key is enqueued, at most one reconcile of it is pending and one running.

Keys belong to groups, the namespaces of jobs, which take turns. A reconcile of a large job may take minutes, and all
workers may be busy with such reconciles: a group without a running reconcile then gets an additional worker.

`Schedule` decides which key is due, with the time as an argument. `WorkQueue` waits and reconciles.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.queue.fair_queue import FairQueue

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.5
"""Seconds until the retry of a failed reconcile; each further failure doubles it."""
LONGEST_BACKOFF = 60.0
MOST_WORKERS = 3
"""How many times the number of workers may run at most, if that many groups have keys: each group that has none running
may start one."""


class Schedule(Generic[K]):
    """When each key is due, and whose turn it is. Times are seconds of one clock, which the caller chooses.

    `group_of` returns the group of a key; by default all keys are one group. `len()` is the number of keys that wait.
    """

    def __init__(
        self,
        group_of: Callable[[K], Hashable] = lambda key: None,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),  # noqa: S311
    ) -> None:
        self._group_of = group_of
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Times of keys, among them old ones, without those that are in `_ready`."""
        self._ready: FairQueue[K] = FairQueue()
        """Keys whose time has come, as `take` has found."""
        self._ready_keys: set[K] = set()
        self._running: set[K] = set()
        self._running_of: Counter[Hashable] = Counter()
        """How many keys of each group run; no zeros."""
        self._failures: dict[K, int] = {}
        self._pushes = 0
        self._jitter = jitter

    def __len__(self) -> int:
        return len(self._due)

    def enqueue(self, key: K, at: float) -> None:
        """Make `key` due at `at`, or earlier where it already is. A running key becomes due again after `done`."""
        if key in self._ready_keys or (key in self._due and self._due[key] <= at):
            return
        self._due[key] = at
        self._push(key)

    def next_due(self) -> float | None:
        """Return when the next key is due that does not run yet, after those that `take` has found due.

        None: not before the next `enqueue` or `done`.
        """
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def take(self, now: float, workers: int | None = None) -> K | None:
        """Return a due key, and mark it as running until `done`; None where no key may run now.

        The groups that have due keys take turns; of one group, the key that is due for longest comes first. Where
        `workers` keys run already, only a group without a running key may have a turn; None: any number may run.
        """
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            self._ready.add(self._group_of(key), key)
            self._ready_keys.add(key)
        running = len(self._running)
        if workers is not None and running >= workers * MOST_WORKERS:
            return None
        all_may = workers is None or running < workers
        found = self._ready.pop(lambda group: all_may or group not in self._running_of)
        if found is not None:
            del self._due[found]
            self._ready_keys.discard(found)
            self._running.add(found)
            self._running_of[self._group_of(found)] += 1
        return found

    def done(self, key: K, now: float, *, again_after: float | None = None, failed: bool = False) -> None:
        """End the run of `key`. It is due again after `again_after` seconds, or after a growing delay if it failed."""
        group = self._group_of(key)
        self._running_of[group] -= 1
        if not self._running_of[group]:
            del self._running_of[group]
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            again_after = doubling_delay(FIRST_BACKOFF, LONGEST_BACKOFF, count) * self._jitter()
        else:
            self._failures.pop(key, None)
        if again_after is not None:
            self.enqueue(key, now + again_after)
        if key in self._due:
            self._due[key] = max(self._due[key], now)  # its wait begins now: until here it was reconciled
            self._push(key)
        self._running.discard(key)  # last: another thread must not see the earlier time as one of a key that waits

    @property
    def any_ready(self) -> bool:
        """Whether keys that `take` has found due wait for the end of others."""
        return len(self._ready) > 0

    def oldest_wait(self, now: float) -> float:
        """Return by how many seconds the longest waiting key is overdue, else 0. Any thread may call this."""
        return max((now - due for due in self._waits() if due < now), default=0.0)

    def due(self, now: float) -> int:
        """Return how many keys are due and wait. Any thread may call this."""
        return sum(due <= now for due in self._waits())

    def _waits(self) -> list[float]:
        """Return when each key is due that does not run. One that runs is often due again, by events of its pods."""
        # list() copies in one step of the interpreter: the event loop may change the dict meanwhile.
        return [due for key, due in list(self._due.items()) if key not in self._running]

    def _push(self, key: K) -> None:
        # The number of pushes orders keys that are due at the same time; keys themselves need no order.
        self._pushes += 1
        heapq.heappush(self._heap, (self._due[key], self._pushes, key))

    def _drop_stale(self) -> None:
        """Drop entries at the head whose time has changed, or whose key is ready or runs; `done` pushes that again."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at and key not in self._running and key not in self._ready_keys:
                return
            heapq.heappop(self._heap)


class WorkQueue(Generic[K]):
    """Reconciles due keys. `reconcile` returns after how many seconds the key is due again; None: when enqueued.

    `group_of`: as for `Schedule`.
    """

    def __init__(
        self,
        reconcile: Callable[[K], Awaitable[float | None]],
        clock: Callable[[], float] = time.monotonic,
        group_of: Callable[[K], Hashable] = lambda key: None,
    ) -> None:
        self._reconcile = reconcile
        self._clock = clock
        self._schedule: Schedule[K] = Schedule(group_of)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._schedule)

    def enqueue(self, key: K, after: float = 0.0) -> None:
        """Make `key` due in `after` seconds or earlier."""
        self._schedule.enqueue(key, self._clock() + after)
        self._changed.set()

    def oldest_wait(self) -> float:
        """Return by how many seconds the longest waiting key is overdue. Any thread may call this."""
        return self._schedule.oldest_wait(self._clock())

    def due(self) -> int:
        """Return how many keys are due and wait, without those that are due later. Any thread may call this."""
        return self._schedule.due(self._clock())

    async def idle(self) -> None:
        """Wait until `run` has found that no key is due."""
        await self._idle.wait()

    async def run(self, workers: int) -> None:
        """Reconcile due keys, `workers` at the same time (more: `Schedule.take`), until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                key = await self._take(workers)
                group.create_task(self._run_one(key))

    async def _take(self, workers: int) -> K:
        while True:
            self._changed.clear()
            now = self._clock()
            key = self._schedule.take(now, workers)
            if key is not None:
                self._idle.clear()
                return key
            if not self._schedule.any_ready:
                self._idle.set()
            # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that arrives together with the event.
            due, timer = self._schedule.next_due(), None
            if due is not None:
                timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._changed.set)
            try:
                await self._changed.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _run_one(self, key: K) -> None:
        again: float | None = None
        failed = False
        try:
            again = await self._reconcile(key)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # An error of one key must not end the others: log it and retry this key.
            log.warning(
                "reconcile of %s failed: %s: %s",
                key,
                type(error).__name__,
                error,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )
            failed = True
        self._schedule.done(key, self._clock(), again_after=again, failed=failed)
        self._changed.set()
