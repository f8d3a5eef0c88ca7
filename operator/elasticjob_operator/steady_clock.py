"""The operator's clock: Unix seconds that never jump, because decisions measure durations with them."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_SLEW = 0.05
"""Seconds by which the clock approaches the host's wall clock in a second, at most."""


class SteadyClock:
    """Returns Unix seconds when called.

    The clock starts at the host's wall clock and advances with its monotonic clock. If the wall clock is set, this
    clock follows gradually: durations are wrong by at most `MAX_SLEW`, and time stamps become right again.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._now = wall()
        self._read_at = monotonic()

    def __call__(self) -> float:
        read_at = self._monotonic()
        passed = read_at - self._read_at
        self._read_at = read_at
        self._now += passed
        behind = self._wall() - self._now
        self._now += max(-MAX_SLEW * passed, min(MAX_SLEW * passed, behind))
        return self._now
