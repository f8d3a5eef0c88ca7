"""The operator's metrics: what a change of a job's status counts, and how jobs are counted by phase."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from elasticjob_operator import metrics
from elasticjob_operator.kube import JOBS, Unclear
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.reconcile import job_metrics
from elasticjob_operator.version import VERSION
from support.operator.build import NOW, condition, status
from support.operator.cluster import Cluster

FAILED = {"class": "UserError", "time": timestamp(NOW)}
PHASES = {"detect": 0.1, "stop": 0.2, "rendezvous": 0.3, "start": 0.4}
STARTED = {"startTime": timestamp(NOW - 40)}
TRAINS = {"lastRendezvousTime": timestamp(NOW), "conditions": [condition("Running", at=NOW - 10)]}
ASKED = {"lastScaleTime": timestamp(NOW - 30), "active": 2}


COSTS = {"goodput": {"productiveSeconds": 90.0, "lostSeconds": 10.0}}


def value(name: str, **labels: str) -> float:
    """Return a metric; one about jobs without a namespace has an empty label, which is none for Prometheus."""
    return (
        REGISTRY.get_sample_value(name, labels) or REGISTRY.get_sample_value(name, {"namespace": "", **labels}) or 0.0
    )


def scaled(active: int) -> dict[str, Any]:
    return {**ASKED, "active": active, "conditions": [condition("FullyScaled", at=NOW - 5)]}


@pytest.mark.parametrize(
    ("before", "after", "strategy", "name", "labels", "added"),
    [
        ({"restarts": 1}, {"restarts": 3, "lastFailure": FAILED}, "InPlace", "elasticjob_restarts_total",
         {"reason": "UserError", "strategy": "InPlace"}, 2),
        ({}, {"restarts": 1, "lastFailure": FAILED}, "Recreate", "elasticjob_restarts_total",
         {"reason": "UserError", "strategy": "Recreate"}, 1),
        ({}, {"lastFailure": FAILED}, "InPlace", "elasticjob_pod_failures_total", {"class": "UserError"}, 1),
        ({"lastFailure": FAILED}, {"lastFailure": FAILED}, "InPlace", "elasticjob_pod_failures_total",
         {"class": "UserError"}, 0),
        (STARTED, {**STARTED, **TRAINS}, "InPlace", "elasticjob_rendezvous_seconds_sum", {}, 30),
        ({**STARTED, **TRAINS}, {**STARTED, **TRAINS}, "InPlace", "elasticjob_rendezvous_seconds_count", {}, 0),
        ({}, {"recentFailures": [{**FAILED, "recoverySeconds": PHASES}]}, "InPlace",
         "elasticjob_recovery_seconds_sum", {"phase": "stop"}, 0.2),
        ({}, {"recentFailures": [{**FAILED, "recoverySeconds": PHASES}]}, "InPlace",
         "elasticjob_recovery_seconds_sum", {"phase": "total"}, 1.0),
        ({"startTime": timestamp(NOW - 1610)}, {"startTime": timestamp(NOW - 1610), **TRAINS}, "InPlace",
         "elasticjob_rendezvous_seconds_bucket", {"le": "1800.0"}, 1),
        ({}, COSTS, "InPlace", "elasticjob_training_seconds_total", {}, 100),
        (COSTS, {"goodput": {"productiveSeconds": 85.0, "lostSeconds": 20.0}}, "InPlace",
         "elasticjob_training_seconds_total", {}, 5),
        (COSTS, {"goodput": {"productiveSeconds": 85.0, "lostSeconds": 20.0}}, "InPlace",
         "elasticjob_lost_seconds_total", {}, 10),
        (ASKED, scaled(4), "InPlace", "elasticjob_scale_seconds_sum", {"direction": "up"}, 25),
        (ASKED, scaled(1), "InPlace", "elasticjob_scale_seconds_sum", {"direction": "down"}, 25),
        (scaled(4), scaled(4), "InPlace", "elasticjob_scale_seconds_count", {"direction": "down"}, 0),
    ],
)  # fmt: skip
def test_what_a_status_write_counts(
    before: dict[str, Any], after: dict[str, Any], strategy: str, name: str, labels: dict[str, str], added: float
) -> None:
    known = value(name, **labels)
    job_metrics.count_change(status(**before), status(**after), strategy, "")
    assert value(name, **labels) - known == pytest.approx(added)


async def test_jobs_are_counted_by_phase_and_reconciles_by_duration_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.jobs.clear()
    reconciled, errors = value("elasticjob_reconcile_seconds_count"), value("elasticjob_reconcile_errors_total")
    cluster = Cluster()
    await cluster.reconcile()
    assert value("elasticjob_jobs", phase="Pending") == 1
    cluster.change(suspend=True)
    await cluster.reconcile()
    assert (value("elasticjob_jobs", phase="Pending"), value("elasticjob_jobs", phase="Suspended")) == (0, 1)

    async def broken(*_: Any) -> Any:
        raise Unclear("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(cluster.api, "get", broken)
        with pytest.raises(Unclear):
            await cluster.reconcile()
    cluster.api.remove(JOBS, "bert")
    assert await cluster.controller.reconcile(("ns", "bert")) is None
    assert value("elasticjob_jobs", phase="Suspended") == 0
    assert value("elasticjob_reconcile_seconds_count") - reconciled == 4
    assert value("elasticjob_reconcile_errors_total") - errors == 1


async def test_a_restart_counts_with_the_strategy_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(
        job_metrics, "count_change", lambda before, after, strategy, namespace: counted.append(strategy)
    )
    for spec in ({}, {"restartStrategy": "Recreate"}):
        await Cluster(**spec).reconcile()
    assert counted == ["InPlace", "Recreate"]


async def test_metrics_about_jobs_have_their_namespace_only_with_the_flag() -> None:
    metrics.jobs.clear()
    cluster = Cluster()
    await cluster.reconcile()
    assert (value("elasticjob_jobs", phase="Pending"), value("elasticjob_jobs", phase="Pending", namespace="ns")) == (
        1,
        0,
    )
    metrics.jobs.clear()
    labelled = Cluster()
    labelled.controller.label_namespaces = True
    await labelled.reconcile()
    assert value("elasticjob_jobs", phase="Pending", namespace="ns") == 1


def test_the_version_is_a_metric() -> None:
    assert value("elasticjob_build_info", version=VERSION) == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("elasticjob_pod_failures_total", {"class": "DeviceUnhealthy"}),
        ("elasticjob_restarts_total", {"reason": "Hang", "strategy": "InPlace"}),
        ("elasticjob_recovery_seconds_count", {"phase": "total"}),
        ("elasticjob_lost_seconds_total", {}),
    ],
)
def test_the_first_fault_is_in_the_rates_because_its_series_begins_with_0(name: str, labels: dict[str, str]) -> None:
    assert REGISTRY.get_sample_value(name, {"namespace": "", **labels}) is not None
