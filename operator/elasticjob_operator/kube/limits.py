"""How fast the operator may ask: a token bucket, and the time of the last good answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class RateLimit:
    """`rate` requests a second, `burst` at once. First come, first served."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1.0 / rate
        self._ahead = self._interval * burst
        self._clock = clock
        self._next = clock() - self._ahead

    def reserve(self) -> float:
        """Take the next turn; seconds until it comes."""
        now = self._clock()
        self._next = max(self._next, now - self._ahead) + self._interval
        return max(0.0, self._next - now)

    async def turn(self) -> None:
        """Wait for the next turn."""
        delay = self.reserve()
        if delay:
            await asyncio.sleep(delay)
