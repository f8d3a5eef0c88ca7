"""Suspending a job, resuming it, and the number of its executions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Outcome, PodState
from elasticjob_operator.actions import (
    CreateSecret,
    CreateStore,
    CreateWorker,
    DeletePod,
    DeleteService,
)
from elasticjob_operator.manifests import key_secret
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.observed import Children, LinkView, Observed
from elasticjob_operator.plan import Plan
from support.operator.build import (
    IMAGE,
    NOW,
    Raw,
    condition,
    conditions_of,
    declared,
    elastic,
    ended,
    events_of,
    job,
    reasons_of,
    report,
    run,
    status,
    status_of,
    steady,
    store,
    worker,
)

SUSPENDED = condition("Suspended", reason="SuspendedByUser")
STORES = (store(), store(1, node="n9"))


def suspended(
    *pods: Pod,
    spec: Raw | None = None,
    children: Children | None = None,
    stores: tuple[Pod, ...] = STORES,
    **fields: Any,
) -> Observed:
    """Return the job with `suspend: true` (or another spec), these pods and status fields."""
    observed = steady(workers=pods)
    changed = job(status=status(**fields), **({"suspend": True} if spec is None else spec))
    return replace(
        observed,
        job=changed,
        stores=stores,
        children=observed.children if children is None else children,
        link=observed.link if stores else LinkView(),
    )


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


def gone(**fields: Any) -> Observed:
    """Return a suspended job of which nothing is left, but with `suspend: false`."""
    known = {"conditions": [SUSPENDED], "rendezvous": {"newest": 3}, "incarnations": "4,2"} | fields
    return suspended(spec={}, children=Children(), stores=(), **known)


def test_suspending_deletes_the_workers_first_and_tells_the_coordinator_that_all_of_them_drain() -> None:
    p = run(suspended(worker(0), worker(1)))
    assert deleted(p) == ["bert-0-0", "bert-1-0"]
    assert p.operator_view is not None
    assert [pod.state for pod in p.operator_view.pods] == [PodState.DRAINING] * 2
    assert p.store_address is not None  # it serves until the workers have ended
    assert reasons_of(p) == {
        "Suspended": ("True", "SuspendedByUser"),
        "RendezvousReady": ("False", "Suspended"),
        "Running": ("False", "Suspended"),
        "FullyScaled": ("False", "Suspended"),
    }
    assert "2 pods still to end" in conditions_of(p)["Suspended"]["message"]
    assert status_of(p)["phase"] == "Suspended"
    assert "Suspended" in events_of(p)


def test_a_pod_that_drains_is_not_replaced_and_not_deleted_again() -> None:
    p = run(suspended(worker(0, deleting=NOW + 25), conditions=[SUSPENDED]))
    assert p.actions == ()
    assert p.requeue_after is not None


def test_a_pod_on_a_node_whose_kubelet_is_down_is_deleted_by_force() -> None:
    observed = replace(suspended(worker(0, deleting=NOW - 5), conditions=[SUSPENDED]), leases={"n1": NOW - 60})
    p = run(observed)
    assert {a.name for a in p.actions if isinstance(a, DeletePod) and a.force} >= {"bert-0-0"}


def test_when_the_workers_have_ended_the_stores_and_the_other_children_go() -> None:
    p = run(suspended(worker(0, **ended(143)), conditions=[SUSPENDED]))
    assert deleted(p) == ["bert-rdzv-0", "bert-rdzv-1"]
    assert {a.name for a in p.actions if isinstance(a, DeleteService)} == {"bert", "bert-rdzv"}
    assert "the store ends" in conditions_of(p)["Suspended"]["message"]


def test_a_suspended_job_has_no_store_and_needs_no_further_reconcile() -> None:
    p = run(suspended(children=Children(), stores=(), conditions=[SUSPENDED]))
    assert (p.actions, p.store_address, p.requeue_after) == ((), None, None)
    assert status_of(p)["rendezvous"] == {"newest": 1}
    assert conditions_of(p)["Suspended"]["message"] == "the job has no pods until spec.suspend is false"


def test_a_job_that_is_created_suspended_starts_its_first_execution_when_it_is_resumed() -> None:
    created = Observed(job=job(suspend=True))
    first = status_of(run(created))
    assert run(created).actions == ()
    assert first["executionAttempts"] == 0
    assert not {"startTime", "runtimeImage", "rendezvous"} & first.keys()
    resumed = status_of(run(Observed(job=job(status=first))))
    assert (resumed["executionAttempts"], resumed["runtimeImage"]) == (1, IMAGE)
    p = run(Observed(job=job(status=resumed)))
    assert [a.name for a in p.actions if isinstance(a, CreateStore)] == ["bert-rdzv-0"]


def test_resuming_begins_an_execution_before_anything_is_created() -> None:
    p = run(gone(executionAttempts=2, runtimeImage="old:1", startTime="2020-01-01T00:00:00Z"))
    assert p.actions == ()
    assert (p.requeue_after or 9.0) < 1.0
    new = status_of(p)
    assert (new["executionAttempts"], new["runtimeImage"], new["startTime"][:4]) == (3, IMAGE, "2027")
    assert reasons_of(p)["Suspended"] == ("False", "Resumed")
    assert events_of(p) == ["Resumed"]


def test_the_next_execution_has_new_keys_a_new_store_and_pods_of_the_next_incarnations() -> None:
    resumed = status_of(run(gone()))
    p = run(suspended(spec={}, children=Children(), stores=(), **resumed))
    assert CreateSecret() in p.actions
    assert [a.name for a in p.actions if isinstance(a, CreateStore)] == ["bert-rdzv-4"]
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] == ["bert-0-5", "bert-1-3"]
    assert not {"StoreLost", "PodReplaced", "Resumed"} & {*events_of(p)}
    assert status_of(p)["phase"] == "Pending"


@pytest.mark.parametrize(("attempts", "name"), [(0, "bert-rdzv"), (1, "bert-rdzv"), (2, "bert-rdzv-2")])
def test_each_execution_has_a_secret_of_its_own(attempts: int, name: str) -> None:
    assert key_secret(job(status=status(executionAttempts=attempts))) == name


def test_a_resumed_job_gathers_as_a_new_one_does() -> None:
    resumed = status_of(run(gone(rendezvousRound=7))) | {
        "incarnations": "5,3",
        "rendezvous": {"incarnation": 4, "newest": 4},
    }
    p = run(suspended(worker(0, 5), worker(1, 3), spec={}, stores=(store(4),), **resumed))
    found = reasons_of(p)
    assert (found["Running"], found["FullyScaled"]) == (("False", "WaitingForMinReplicas"), ("False", "ScalingUp"))
    assert (status_of(p)["phase"], status_of(p)["rendezvousRound"]) == ("Starting", 7)


@pytest.mark.parametrize(
    "left",
    [
        suspended(worker(0, deleting=NOW + 9), spec={}, conditions=[SUSPENDED]),
        suspended(spec={}, conditions=[SUSPENDED]),
        suspended(spec={}, stores=(), conditions=[SUSPENDED]),
    ],
    ids=["workers", "stores", "the Services"],
)
def test_a_job_that_is_resumed_while_it_drains_is_suspended_completely_first(left: Observed) -> None:
    p = run(left)
    assert not any(isinstance(a, (CreateWorker, CreateStore)) for a in p.actions)
    assert p.status is None or reasons_of(p)["Suspended"][0] == "True"


def test_an_outcome_that_comes_while_the_job_drains_ends_it() -> None:
    observed = suspended(worker(0), worker(1), conditions=[SUSPENDED])
    finished = report(worker(0), worker(1), outcome=Outcome.SUCCEEDED)
    p = run(replace(observed, link=replace(observed.link, report=finished)))
    assert reasons_of(p)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")


def test_a_job_that_ended_while_it_drained_begins_no_further_execution() -> None:
    ended_well = worker(0, **ended(0, "Completed", declared(Outcome.SUCCEEDED)))
    known = {"conditions": [SUSPENDED], "executionAttempts": 2, "runtimeImage": "old:1"}
    p = run(suspended(ended_well, spec={}, children=Children(), stores=(), **known))
    new = status_of(p)
    assert (new["executionAttempts"], new["runtimeImage"], new["phase"]) == (2, "old:1", "Succeeded")
    assert reasons_of(p)["Suspended"] == ("False", "Finished")


def test_suspending_a_finished_job_changes_nothing() -> None:
    complete = [condition("SuccessCriteriaMet"), condition("Complete")]
    p = run(suspended(worker(0, **ended(0)), conditions=complete))
    assert "Suspended" not in reasons_of(p)
    assert "Suspended" not in events_of(p)


def test_an_elastic_target_may_change_while_the_job_is_suspended() -> None:
    p = run(
        suspended(spec={**elastic(1, 4, 3), "suspend": True}, children=Children(), stores=(), conditions=[SUSPENDED])
    )
    assert (p.actions, status_of(p)["targetReplicas"]) == ((), 3)
