"""Which ranks a monitor process watches, and when it counts one as lost. Pure: counts and times are arguments."""

from __future__ import annotations

from collections.abc import Set as AbstractSet


def watched_ranks(own: int, world_size: int, left: AbstractSet[int]) -> set[int]:
    """Return the ranks that `own` watches: those at distances of 1, 2, 4 ..., and what ranks that have left watched.

    Ranks of one node are consecutive: when it is lost, each of them is watched from another node too, as long as the
    node has no more than half of the ranks. Of a larger one some are found only after further time-outs, by who
    watches in the place of those already found.
    """
    watched: set[int] = set()
    pending = [own]
    replaced = {own}
    while pending:
        rank = pending.pop()
        distance = 1
        while distance < world_size:
            other = (rank + distance) % world_size
            if other not in left:
                watched.add(other)
            elif other not in replaced:
                replaced.add(other)
                pending.append(other)
            distance *= 2
    return watched - {own}


class LossDetector:
    """Counts a rank as lost once its heartbeats have not changed for `timeout` seconds.

    Only differences of this process's own clock are compared, never clocks of two hosts.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[int, tuple[int, float]] = {}
        """By rank, the last count and when it was new."""

    def observe(self, rank: int, count: int, now: float) -> bool:
        """Note a rank's count of heartbeats; return whether the rank is lost."""
        last = self._seen.get(rank)
        if last is None or last[0] != count:
            self._seen[rank] = count, now
            return False
        return now - last[1] > self._timeout


class RunningClock:
    """Seconds during which this process could run: while a host or container is paused, nothing is overdue."""

    def __init__(self, now: float, longest_step: float) -> None:
        """`now`: a monotonic clock. `longest_step`: seconds between two readings of which all count."""
        self._last = now
        self._longest_step = longest_step
        self.now = 0.0

    def advance(self, now: float) -> float:
        """Return the time, given a new reading of the monotonic clock."""
        self.now += min(now - self._last, self._longest_step)
        self._last = now
        return self.now
