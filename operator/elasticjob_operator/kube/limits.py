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

    async def acquire(self, namespace: str = "") -> None:
        """Wait until a request may be sent; `namespace`: of its object, empty for requests that have none."""
        ...


class RateLimit:
    """Allows `rate` requests a second and `burst` at once.

    While requests wait, their namespaces take turns: a thousand requests of one delay the next one of another by one
    turn. Those of one namespace are sent in the order of the calls.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1.0 / rate
        self._ahead = self._interval * burst
        self._clock = clock
        self._next = clock() - self._ahead
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._timer: asyncio.TimerHandle | None = None

    def until_next(self) -> float:
        """Return the seconds until a token is there, if none is taken before; 0 if one is."""
        return max(0.0, self._next + self._interval - self._clock())

    def take(self) -> None:
        """Take a token that is there."""
        self._next = max(self._next, self._clock() - self._ahead) + self._interval

    async def acquire(self, namespace: str = "") -> None:
        """Wait for the turn of this namespace, and take a token."""
        if not len(self._waiting) and not self.until_next():
            self.take()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(namespace, turn)
        self._set_timer()
        await turn

    def until_half(self) -> float:
        """Return the seconds until half of the burst is there, if no token is taken before; 0 if it is."""
        return max(0.0, self._next + self._ahead / 2 - self._clock())

    def _set_timer(self) -> None:
        if self._timer is None and len(self._waiting):
            self._timer = asyncio.get_running_loop().call_later(self.until_next(), self._give)

    def _give(self) -> None:
        """Give the tokens that are there to those whose turn it is."""
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
    """Lets so many requests be under way at once; those that wait begin by turns of their namespaces.

    An API server that is slower than the rate limit has its own queue, and so has the pool of connections: a request
    that waits there has lost its turn.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def hold(self, namespace: str) -> AsyncIterator[None]:
        """Wait for the turn of this namespace; the request is under way until the context ends."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.add(namespace, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next request begin that still waits."""
        while (turn := self._waiting.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class SpareRate:
    """What other requests leave of a limit: half of the burst stays theirs."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit

    async def acquire(self, namespace: str = "") -> None:
        """Wait until half of the burst is there, and take a token."""
        while delay := self._limit.until_half():  # noqa: ASYNC110  # tokens come with time
            await asyncio.sleep(delay)
        self._limit.take()
