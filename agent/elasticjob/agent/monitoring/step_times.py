"""How long the steps of this node's workers take, and how much of that is their own: looked at once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from elasticjob.agent.monitoring.worker_progress import ProgressReport

WINDOW = 60.0
"""Seconds between looks: a slow rank is news for people, and nobody should be woken more often for it."""
MIN_STEPS = 5
"""Fewer say little: where steps are long, a window lasts until all workers have made them."""


class StepTimeMonitor:
    """Tells, for window after window, the seconds of a step, and by local rank each worker's own part of them."""

    def __init__(
        self,
        signs: Callable[[], Sequence[ProgressReport]],
        tell: Callable[[float, tuple[float, ...]], None],
        window: float = WINDOW,
    ) -> None:
        """`signs`: the latest report of every running worker that has made one, by local rank."""
        self._signs = signs
        self._tell = tell
        self._window = window
        self._timer: asyncio.TimerHandle | None = None

    def start(self, workers: int) -> None:
        """One of this many workers of a round here has come to report; where none does, nobody is woken."""
        if self._timer is None:
            self._wait((), workers)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, before: Sequence[ProgressReport], workers: int) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._window, self._look, before, workers)

    def _look(self, before: Sequence[ProgressReport], workers: int) -> None:
        after = self._signs()
        steps = common_steps(before, after) if len(after) == workers else 0
        if steps >= MIN_STEPS and (times := step_times(before, after)) is not None:
            self._tell(*times)
        self._wait(before if 0 <= steps < MIN_STEPS else after, workers)


def common_steps(before: Sequence[ProgressReport], after: Sequence[ProgressReport]) -> int:
    """Steps that every worker has made in between; below 0 where they do not compare: somebody has only begun."""
    if len(before) != len(after):
        return -1
    return min(b.step - a.step for a, b in zip(before, after, strict=True))


def step_times(
    before: Sequence[ProgressReport], after: Sequence[ProgressReport]
) -> tuple[float, tuple[float, ...]] | None:
    """Seconds of a step, and each worker's own part; None where a worker's own part is not known."""
    steps = [(a, b, b.step - a.step) for a, b in zip(before, after, strict=True)]
    own = tuple((b.own_seconds - a.own_seconds) / n for a, b, n in steps)
    if min(own) <= 0:
        return None
    return max((b.time - a.time) / n for a, b, n in steps), own
