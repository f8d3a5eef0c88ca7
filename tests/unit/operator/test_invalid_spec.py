"""A mistake in the command of a job that has run before: it ends nothing, and there is a way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Role
from elasticjob_operator.actions import CreateWorker, DeletePod
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.observation.job_memory import LONGEST_RETRY
from support.operator.build import (
    NOW,
    condition,
    conditions_of,
    job,
    reasons_of,
    run,
    status,
    status_of,
    steady,
    worker,
)
from support.operator.cluster import Cluster
from support.operator.world import job_status

SUSPENDED = condition("Suspended", reason="SuspendedByUser")


def template(command: list[str]) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "image": "user:1", "command": command}]}}


GOOD = template(["torchrun", "--nproc-per-node=2", "train.py"])
BAD = template(["torchrun", "--nproc-per-node=4", "train.py"])
MISTAKE = "nprocPerNode is 2 and the command has --nproc-per-node=4"


def test_a_running_job_keeps_its_link_and_replaces_its_lost_pods() -> None:
    observed = steady(workers=(worker(0),), last_report=None)
    before = replace(observed, job=job(status=status(), nprocPerNode=2, template=GOOD))
    after = replace(observed, job=job(status=status(), nprocPerNode=2, template=BAD))
    p = run(after)
    assert replace(p, status=None) == replace(run(before), status=None)
    assert p.store_address is not None
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] != []
    assert "Failed" not in reasons_of(p)
    assert f"no new pod can be created: {MISTAKE}" in conditions_of(p)["Running"]["message"]


def test_a_job_is_suspended_with_a_template_that_has_a_mistake() -> None:
    changed = job(status=status(), suspend=True, nprocPerNode=2, template=BAD)
    p = run(replace(steady(workers=(worker(0), worker(1))), job=changed))
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-0-0", "bert-1-0"]
    assert p.store_address is not None
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedByUser")


@pytest.mark.parametrize(("spec", "conditions"), [({"suspend": True}, []), ({}, [SUSPENDED])], ids=["new", "before"])
def test_the_mistake_of_a_suspended_job_is_in_its_condition_and_ends_nothing(
    spec: dict[str, Any], conditions: list[Any]
) -> None:
    """It has no store, as a job that has never started."""
    fields = {"conditions": conditions, "restarts": 7, "executionAttempts": 0}
    p = run(Observed(job(status=fields, nprocPerNode=2, template=BAD, **spec)))
    assert "Failed" not in reasons_of(p)
    assert status_of(p)["restarts"] == 7
    if spec:
        assert MISTAKE in conditions_of(p)["Suspended"]["message"]


def test_a_job_that_has_never_started_fails() -> None:
    p = run(Observed(job(nprocPerNode=2, template=BAD)), NOW)
    assert reasons_of(p) == {"Failed": ("True", "InvalidSpec")}


async def finish_pods(cluster: Cluster) -> None:
    """Let all pods that are being deleted end, until the operator does nothing more."""
    for _ in range(6):
        for pod in (*cluster.api.pods(Role.WORKER), *cluster.api.pods(Role.STORE)):
            cluster.world.finish_deletion(pod)
        cluster.world.drop_deleted()
        cluster.api.now += 1.0
        await cluster.reconcile()


async def test_a_job_that_is_resumed_with_a_mistake_goes_on_once_it_is_corrected() -> None:
    cluster = Cluster(nprocPerNode=2, template=GOOD)
    await cluster.reconcile()
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]
    cluster.change(suspend=True, template=BAD)
    await cluster.reconcile()
    await finish_pods(cluster)
    assert (cluster.workers(), job_status(cluster.api)["phase"]) == ([], "Suspended")
    cluster.change(suspend=False)
    await cluster.reconcile_for(10.0)
    assert cluster.workers() == []
    running = cluster.running()
    assert (running["status"], running["reason"]) == ("False", "InvalidSpec")
    assert MISTAKE in running["message"]
    assert "set suspend to true in the same change" in running["message"]
    cluster.change(suspend=True, template=GOOD)
    await cluster.reconcile()
    await finish_pods(cluster)
    cluster.change(suspend=False)
    await cluster.reconcile_for(LONGEST_RETRY + 10.0)
    assert len(cluster.workers()) == 2
