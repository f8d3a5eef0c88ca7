"""Delays that grow: with each failure in a row, or with the time that a state has lasted."""

from __future__ import annotations

_MOST_DOUBLINGS = 64
"""More doublings reach every limit, and a float overflows after 1024."""


def doubling_delay(first: float, longest: float, failures: int) -> float:
    """Return the seconds until the next try after `failures` failures in a row, from 1: `first`, doubled each time."""
    return min(longest, first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


def growing_interval(elapsed: float, first: float, longest: float) -> float:
    """Return the seconds until the next check of a state that has lasted for `elapsed` seconds: an eighth of that."""
    return min(longest, max(first, elapsed / 8))
