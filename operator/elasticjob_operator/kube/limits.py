"""The client's rate limit: a token bucket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


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
