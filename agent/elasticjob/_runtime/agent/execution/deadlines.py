"""When the workers of a round must have ended, and what limits a grace period."""

from __future__ import annotations

import math
from collections.abc import Callable


class WorkerDeadlines:
    """The three times that end workers: the round's, the pod's, and the one at which the Node ends.

    Every change is published to the workers, whose `deadline()` returns the earliest of the three. All times are those
    of `now`; all durations are in seconds.
    """

    def __init__(self, now: Callable[[], float], publish: Callable[[float], None]) -> None:
        self._now = now
        self._publish = publish
        self._round_end = math.inf
        """When the workers of this round must have ended."""
        self._pod_end = math.inf
        """When all workers must have ended, because the pod's grace period ends soon after."""
        self._node_end = math.inf
        """When this Node ends, as it is announced."""

    def begin_round(self) -> None:
        """Forget the end of the last round. The ends of the pod and of the Node stay."""
        self._round_end = math.inf
        self.end_within(math.inf)

    def end_within(self, seconds: float) -> None:
        """Let the workers know that they are killed after `seconds`, or earlier if an earlier end has been set."""
        self._round_end = min(self._round_end, self._pod_end, self._now() + seconds)
        self._publish(min(self._round_end, self._node_end))

    def pod_ends_within(self, seconds: float | None) -> None:
        """Take the pod's grace period into account from now on; None: it has no limit."""
        if seconds is not None:
            self._pod_end = min(self._pod_end, self._now() + seconds)

    def node_ends_within(self, seconds: float | None) -> None:
        """Let the workers know when this Node ends; None: it does not. The agent does not kill them earlier for it."""
        self._node_end = math.inf if seconds is None else self._now() + max(0.0, seconds)
        self.end_within(math.inf)

    def within_pod_grace(self, seconds: float, at_least: float) -> float:
        """Return `seconds`, or what the pod's grace period leaves if that is less; `at_least` if that is even less."""
        return min(seconds, max(at_least, self._pod_end - self._now()))
