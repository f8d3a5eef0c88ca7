"""What a write of a job's status adds to the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticjob_operator import metrics
from elasticjob_operator.model.raw import integer, mapping, moment, objects, text

Status = Mapping[str, Any]


def count_change(before: Status, after: Status, strategy: str) -> None:
    """Update the metrics by the difference between a job's status before and after a write. `strategy`: its
    `spec.restartStrategy`."""
    restarted = integer(after, "restarts") - integer(before, "restarts")
    last = mapping(after, "lastFailure")
    if restarted > 0:
        metrics.restarts.labels(text(last, "class") or "Unknown", strategy).inc(restarted)
    if last and last != mapping(before, "lastFailure"):
        metrics.pod_failures.labels(text(last, "class") or "Unknown").inc()
    _observe_first_round(before, after)
    for record in objects(after, "recentFailures"):
        if record not in objects(before, "recentFailures"):
            phases = mapping(record, "recoverySeconds")
            for phase, seconds in phases.items():
                metrics.recovery_seconds.labels(phase).observe(seconds)
            if phases:
                metrics.recovery_seconds.labels("total").observe(sum(phases.values()))
    _observe_scaling(before, after)


def _observe_first_round(before: Status, after: Status) -> None:
    # Both times are the operator's; lastRendezvousTime is the store's.
    started, running = moment(before, "startTime"), _true_since(after, "Running")
    if "lastRendezvousTime" not in before and started is not None and running is not None:
        metrics.rendezvous_seconds.observe(max(0.0, running - started))


def _observe_scaling(before: Status, after: Status) -> None:
    requested, done = moment(before, "lastScaleTime"), _true_since(after, "FullyScaled")
    if requested is None or done is None or _true_since(before, "FullyScaled") is not None or done < requested:
        return
    direction = "up" if integer(after, "active") > integer(before, "active") else "down"
    metrics.scale_seconds.labels(direction).observe(done - requested)


def _true_since(status: Status, kind: str) -> float | None:
    """Return since when a condition is True, in Unix seconds; None where it is not True."""
    found = (c for c in objects(status, "conditions") if text(c, "type") == kind and text(c, "status") == "True")
    return moment(next(found, {}), "lastTransitionTime")
