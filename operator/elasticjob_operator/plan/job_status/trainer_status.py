"""`status.trainerStatus`: what the training script reports by `elasticjob.progress`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elasticjob._runtime.contract.messages import TrainingProgress
from elasticjob_operator.model.cluster.raw import mapping, moment, timestamp
from elasticjob_operator.plan.job_status.decisions import Decisions

FIELD = "trainerStatus"
MIN_SECONDS = 25.0
"""Seconds from one status write to the next that changes this field only. The store reports it every 30 s, and this is
less: the two are timed by different clocks."""
MAX_METRICS = 32
MAX_NAME = 128
MAX_VALUE = 64
MAX_STEPS = 2**53
"""A larger total cannot be a number of steps; the API server would reject the seconds that it leads to."""


def trainer_status(decisions: Decisions) -> dict[str, Any] | None:
    """Return the field; None if the script has never reported anything. The last one stays until the next report."""
    before = dict(mapping(decisions.inputs.status.raw, FIELD))
    progress = decisions.inputs.report.progress if decisions.inputs.report else None
    if progress is None:
        return before or None
    record = _record(progress)
    if decisions.inputs.report is not None and decisions.inputs.report.stage:
        record["stage"] = decisions.inputs.report.stage
    if record == {name: value for name, value in before.items() if name != "lastUpdatedTime"}:
        return before
    return record | {"lastUpdatedTime": timestamp(decisions.inputs.now)}


def is_early(before: Mapping[str, Any], now: float) -> bool:
    """Return whether the status `before` has a field so new that a change of it alone is not written yet."""
    written = moment(before, FIELD, "lastUpdatedTime")
    return written is not None and 0 <= now - written < MIN_SECONDS


def _record(progress: TrainingProgress) -> dict[str, Any]:
    record: dict[str, Any] = {"step": progress.step}
    total = progress.total
    if total is not None and 0 < total <= MAX_STEPS:
        done = min(max(progress.step, 0), total)
        record["progressPercentage"] = 100 * done // total
        if progress.step_seconds is not None or done == total:
            seconds = (total - done) * (progress.step_seconds or 0.0)
            record["estimatedRemainingSeconds"] = math.ceil(min(seconds, MAX_STEPS))
    # Names are keys of a map list: the API server rejects two that are equal once they are cut.
    values = {m.name[:MAX_NAME]: m.value[:MAX_VALUE] for m in progress.metrics[:MAX_METRICS]}
    return record | ({"metrics": [{"name": name, "value": value} for name, value in values.items()]} if values else {})
