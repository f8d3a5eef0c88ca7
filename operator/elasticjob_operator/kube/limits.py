"""The client's rate limit: a token bucket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Limit(Protocol):
    """What a client waits for before each request."""

    async def acquire(self) -> None: ...


class RateLimit:
    """Allows `rate` requests a second and `burst` at once, in the order of the calls."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1.0 / rate
        self._ahead = self._interval * burst
        self._clock = clock
        self._next = clock() - self._ahead

    def reserve(self) -> float:
        """Take a token; return the seconds until it is valid."""
        now = self._clock()
        self._next = max(self._next, now - self._ahead) + self._interval
        return max(0.0, self._next - now)

    async def acquire(self) -> None:
        """Take a token and wait until it is valid."""
        delay = self.reserve()
        if delay:
            await asyncio.sleep(delay)

    def until_half(self) -> float:
        """Return the seconds until half of the burst is there, if no token is taken before; 0 if it is."""
        return max(0.0, self._next + self._ahead / 2 - self._clock())


class SpareRate:
    """What other requests leave of a limit: half of the burst stays theirs."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit

    async def acquire(self) -> None:
        """Wait until half of the burst is there, and take a token."""
        while delay := self._limit.until_half():  # noqa: ASYNC110  # tokens come with time
            await asyncio.sleep(delay)
        self._limit.reserve()
