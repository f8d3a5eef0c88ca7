"""The client's limits: a token bucket, and how many requests are under way. Namespaces take turns in both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from elasticjob_operator.queue.fair_queue import FairQueue


class Limit(Protocol):
    """What a client waits for before each request."""

    async def acquire(self, group: str = "") -> None:
        """Wait until a request may be sent; `group`: the namespace of its object, empty for requests that have none."""
        ...


class RateLimit:
    """Allows `rate` requests a second and `burst` at once.

    While requests wait, their groups (namespaces) take turns: a thousand waiting requests of one group delay a request
    of another by one request only. Those of one group are sent in the order of the calls.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1.0 / rate
        self._burst_seconds = self._interval * burst
        """Seconds in which the tokens of a burst come."""
        self._clock = clock
        self._last_taken = clock() - self._burst_seconds
        """When the last token that was taken has come or will come, by `clock`: with a full burst this long ago."""
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._timer: asyncio.TimerHandle | None = None

    def until_next(self) -> float:
        """Return the seconds until the next token is free; 0 if one is free now."""
        return max(0.0, self._last_taken + self._interval - self._clock())

    def take(self) -> None:
        """Take a token that is free."""
        self._last_taken = max(self._last_taken, self._clock() - self._burst_seconds) + self._interval

    async def acquire(self, group: str = "") -> None:
        """Wait for the turn of this group, and take a token."""
        if not len(self._waiting) and not self.until_next():
            self.take()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(group, turn)
        self._set_timer()
        await turn

    def until_half(self) -> float:
        """Return the seconds until half of the burst is free, if no token is taken before; 0 if it is free now."""
        return max(0.0, self._last_taken + self._burst_seconds / 2 - self._clock())

    def _set_timer(self) -> None:
        if self._timer is None and len(self._waiting):
            self._timer = asyncio.get_running_loop().call_later(self.until_next(), self._admit_waiting)

    def _admit_waiting(self) -> None:
        """Give the free tokens to the requests whose turn it is."""
        self._timer = None
        while not self.until_next():
            turn = self._waiting.pop()
            if turn is None:
                return
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self.take()
        self._set_timer()


class ConcurrencyLimit:
    """Allows `most` requests at a time. Groups (namespaces) take turns: the next request to begin is one of the next
    group.

    Without this limit, requests would queue in the pool of connections or in a slow API server, where groups do not
    take turns.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def hold(self, group: str) -> AsyncIterator[None]:
        """Wait for the turn of this group; the request is under way until the context ends."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.add(group, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._admit_next()
                raise
        try:
            yield
        finally:
            self._admit_next()

    def _admit_next(self) -> None:
        """Let the next request begin that still waits."""
        while (turn := self._waiting.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class LowPriorityLimit:
    """Takes tokens of a limit only while at least half of the burst is free, so that other requests never wait for
    these."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit

    async def acquire(self, group: str = "") -> None:
        """Wait until half of the burst is free, and take a token; `group` has no effect."""
        while delay := self._limit.until_half():  # noqa: ASYNC110  # tokens come with time
            await asyncio.sleep(delay)
        self._limit.take()
