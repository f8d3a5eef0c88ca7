"""What a job has reported while a page was open: the status keeps only the last values. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elasticjob.cli.views.output import without_empty
from elasticjob.cli.views.times import parse_time

MOST_SAMPLES = 600
"""Samples of a job. When there are more, every second one is dropped, so that they always cover the whole time."""
SPEED_SECONDS = 4.0
"""A speed is measured over this many seconds at least: the times in a status are whole seconds."""

Sample = Mapping[str, Any]


class ProgressSamples:
    """Steps and metrics of one job, oldest first."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def add(self, progress: Mapping[str, Any], now: float) -> None:
        """Add a `status.trainerStatus`, unless it is the last one again. `now`: Unix time, if it has none."""
        step = progress.get("step")
        metrics = {str(m.get("name")): m.get("value") for m in progress.get("metrics") or ()}
        numbers = {name: value for name, text in metrics.items() if (value := _number(text)) is not None}
        time = parse_time(progress.get("lastUpdatedTime")) or now
        last = self.samples[-1] if self.samples else {"time": -math.inf}
        if (step is None and not numbers) or time <= last["time"]:
            return
        self.samples.append(
            without_empty(
                {"time": time, "step": step, "stepsPerSecond": self._speed(step, time), "metrics": numbers or None}
            )
        )
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[:-1:2] + self.samples[-1:]

    def _speed(self, step: int | None, time: float) -> float | None:
        if step is None:
            return None
        earlier = (s for s in reversed(self.samples) if "step" in s and time - s["time"] >= SPEED_SECONDS)
        before = next(earlier, None)
        if before is None or step < before["step"]:
            return None  # training went on from an older state
        return float((step - before["step"]) / (time - before["time"]))


def _number(text: object) -> float | None:
    try:
        value = float(str(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
