"""The training of a round, from reports of single steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import Metric, TrainingProgress
from elasticjob._runtime.contract.names import RoundId


@dataclass(frozen=True)
class ReportedStep:
    """What one report says of the training."""

    step: int | None
    """None: it names none, as the first and the last one of a Trainer."""
    total: int | None
    done: bool
    """Whether the training is complete: its step is the total."""
    metrics: tuple[Metric, ...]


class ReportedTraining:
    """The training of a round, from what was reported of it."""

    def __init__(self, round_id: RoundId) -> None:
        self.round = round_id
        self._total: int | None = None
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._metrics: tuple[Metric, ...] = ()

    def add(self, report: ReportedStep, now: float) -> None:
        """Take a report that came at `now`, in seconds."""
        self._total = self._total if report.total is None else report.total
        self._metrics = report.metrics or self._metrics
        step = self._total if report.done and report.step is None else report.step
        if step is not None:
            self._first, self._last = self._first or (step, now), (step, now)

    @property
    def progress(self) -> TrainingProgress | None:
        """What is known; None before the first step."""
        if self._first is None or self._last is None:
            return None
        steps, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        step_seconds = round(seconds / steps, 6) if steps > 0 and seconds > 0 else None
        return TrainingProgress(self.round, self._last[0], self._total, step_seconds, self._metrics)
