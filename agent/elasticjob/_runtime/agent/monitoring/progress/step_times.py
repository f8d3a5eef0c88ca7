"""Measure how long a step takes in this pod, and how much of it is each worker's own work, once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport

WINDOW = 60.0
"""Seconds of a window. Users do not need the result more often, and every window wakes the agent."""
MIN_STEPS = 5
"""Every worker makes at least this many steps in a window. If steps are long, the window is extended."""


class StepTimeMonitor:
    """Reports for every window the seconds of a step, and how many of them each worker spent in its own work."""

    def __init__(
        self,
        heartbeats: Callable[[], Sequence[ProgressReport]],
        report: Callable[[float, tuple[float, ...]], None],
        window: float = WINDOW,
    ) -> None:
        """`heartbeats` returns the last heartbeat of every running worker that has made a step, by local rank.

        `report` gets the seconds of a step, and each worker's own seconds by local rank.
        """
        self._heartbeats = heartbeats
        self._report = report
        self._window = window
        self._timer: asyncio.TimerHandle | None = None

    def start(self, workers: int) -> None:
        """Start the first window of a round of `workers` local workers, unless it has started.

        To be called when a worker connects: the timer does not run for workers that report nothing.
        """
        if self._timer is None:
            self._wait((), workers)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, before: Sequence[ProgressReport], workers: int) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._window, self._end_window, before, workers)

    def _end_window(self, before: Sequence[ProgressReport], workers: int) -> None:
        after = self._heartbeats()
        steps = common_steps(before, after) if len(after) == workers else 0
        if steps >= MIN_STEPS and (times := step_times(before, after)) is not None:
            self._report(*times)
        self._wait(before if 0 <= steps < MIN_STEPS else after, workers)


def common_steps(before: Sequence[ProgressReport], after: Sequence[ProgressReport]) -> int:
    """Return how many steps every worker has made from `before` to `after`.

    Below 0 when the two do not compare: a worker has made its first step, or has restarted its step count.
    """
    if len(before) != len(after):
        return -1
    return min(b.step - a.step for a, b in zip(before, after, strict=True))


def step_times(
    before: Sequence[ProgressReport], after: Sequence[ProgressReport]
) -> tuple[float, tuple[float, ...]] | None:
    """Return the seconds of a step and of each worker's own work in it; None when a worker does not measure its own."""
    steps = [(a, b, b.step - a.step) for a, b in zip(before, after, strict=True)]
    own = tuple((b.own_seconds - a.own_seconds) / n for a, b, n in steps)
    if min(own) <= 0:
        return None
    return max((b.time - a.time) / n for a, b, n in steps), own
