"""What a write of a job's status adds to the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticjob_operator import metrics
from elasticjob_operator.model.cluster.raw import integer, mapping, moment, objects, real, text

Status = Mapping[str, Any]


def count_change(before: Status, after: Status, strategy: str, namespace: str) -> None:
    """Update the metrics by the difference between a job's status before and after a write.

    `strategy`: its `spec.restartStrategy`. `namespace`: the value of the label, empty if metrics have none.
    """
    restarted = integer(after, "restarts") - integer(before, "restarts")
    last = mapping(after, "lastFailure")
    if restarted > 0:
        metrics.restarts.labels(text(last, "class") or "Unknown", strategy, namespace).inc(restarted)
    if last and last != mapping(before, "lastFailure"):
        metrics.pod_failures.labels(text(last, "class") or "Unknown", namespace).inc()
    _observe_first_round(before, after, namespace)
    for record in objects(after, "recentFailures"):
        if record not in objects(before, "recentFailures"):
            phases = mapping(record, "recoverySeconds")
            for phase, seconds in phases.items():
                metrics.recovery_seconds.labels(phase, namespace).observe(seconds)
            if phases:
                metrics.recovery_seconds.labels("total", namespace).observe(sum(phases.values()))
    _observe_scaling(before, after, namespace)
    _count_goodput(before, after, namespace)


def _observe_first_round(before: Status, after: Status, namespace: str) -> None:
    # Both times are the operator's; lastRendezvousTime is the store's.
    started, running = moment(before, "startTime"), _true_since(after, "Running")
    if "lastRendezvousTime" not in before and started is not None and running is not None:
        metrics.rendezvous_seconds.labels(namespace).observe(max(0.0, running - started))


def _observe_scaling(before: Status, after: Status, namespace: str) -> None:
    requested, done = moment(before, "lastScaleTime"), _true_since(after, "FullyScaled")
    if requested is None or done is None or _true_since(before, "FullyScaled") is not None or done < requested:
        return
    direction = "up" if integer(after, "active") > integer(before, "active") else "down"
    metrics.scale_seconds.labels(direction, namespace).observe(done - requested)


def _count_goodput(before: Status, after: Status, namespace: str) -> None:
    # Both sums only grow. productiveSeconds does not: a fault's cost is known, and moves from there, after it.
    def spent(status: Status, *names: str) -> float:
        return sum(real(status, "goodput", name) for name in names)

    both = ("productiveSeconds", "lostSeconds")
    metrics.training_seconds.labels(namespace).inc(max(0.0, spent(after, *both) - spent(before, *both)))
    metrics.lost_seconds.labels(namespace).inc(max(0.0, spent(after, "lostSeconds") - spent(before, "lostSeconds")))


def _true_since(status: Status, kind: str) -> float | None:
    """Return since when a condition is True, in Unix seconds; None where it is not True."""
    found = (c for c in objects(status, "conditions") if text(c, "type") == kind and text(c, "status") == "True")
    return moment(next(found, {}), "lastTransitionTime")
