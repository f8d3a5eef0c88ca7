"""Which pods go when a job shrinks, and which indices it then has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import PodState, RoundSettings
from elasticjob._runtime.contract.names import Env, Role
from elasticjob_operator.actions import CreateWorker, DeletePod
from elasticjob_operator.kube import JOBS, PODS
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.status_lists import read_ranges
from elasticjob_operator.model.observed import Children, LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.plan import Plan
from support.operator.build import (
    NOW,
    Raw,
    condition,
    elastic,
    ended,
    gathering,
    job,
    killed,
    link,
    report,
    run,
    status,
    status_of,
    steady,
    unschedulable,
    worker,
)
from support.operator.cluster import Cluster
from support.operator.world import job_status


def pending(index: int) -> Pod:
    return worker(index, **unschedulable())


def resized(replicas: int, *pods: Pod, before: int, members: tuple[int, ...] = (), **fields: Any) -> Observed:
    """Return a job of `before` pods whose user asks for another number; these indices train, or all running ones."""
    known = status(**({"incarnations": ",".join("0" * before), "targetReplicas": before} | fields))
    running = [pod for pod in pods if pod.running]
    last = report(*running)
    if members:
        nodes = tuple(replace(node, member=node.index in members) for node in last.nodes)
        last = replace(last, nodes=nodes, active=len(members), world_size=len(members))
    observed = steady(workers=pods, last_report=last)
    return replace(observed, job=job(status=known, **elastic(1, 8, replicas)))


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


def created(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, CreateWorker)]


def vacant_of(p: Plan) -> str:
    return ",".join(map(str, sorted(read_ranges(status_of(p), "vacantIndices"))))


@pytest.mark.parametrize(
    ("observed", "gone", "vacant"),
    [
        (resized(2, worker(0), worker(1), worker(2), before=3), ["bert-2-0"], None),
        (resized(2, pending(0), worker(1), worker(2), before=3), ["bert-0-0"], "0"),
        (resized(2, pending(0), pending(1), worker(2), worker(3), before=4), ["bert-0-0", "bert-1-0"], "0,1"),
        (resized(2, worker(0), pending(1), worker(2), worker(3), before=4), ["bert-1-0", "bert-3-0"], "1"),
        (resized(2, worker(0), worker(1), worker(2), before=3, members=(1, 2)), ["bert-0-0"], "0"),
        (resized(2, worker(0, phase="Pending"), worker(1), worker(2), before=3), ["bert-0-0"], "0"),
        (resized(2, worker(0), worker(1, deleting=NOW + 9), worker(2), before=3), [], "1"),
        (resized(1, worker(0), pending(1), worker(2), before=3, members=(2,)), ["bert-0-0", "bert-1-0"], "0,1"),
        (resized(2, worker(0, phase="Pending"), pending(1), worker(2), before=3), ["bert-1-0"], "1"),
    ],
    ids=[
        "all train", "the first is pending", "two are pending", "one is pending, one trains", "one stands by",
        "one starts", "one is being deleted", "by use", "one without a node before one that starts",
    ],
)  # fmt: skip
def test_pods_that_do_no_work_go_first(observed: Observed, gone: list[str], vacant: str | None) -> None:
    p = run(observed)
    assert deleted(p) == gone
    assert created(p) == []
    assert (vacant_of(p) or None) == vacant
    assert p.operator_view is not None
    states = {pod.pod: pod.state for pod in p.operator_view.pods}
    assert all(states[name] is PodState.DRAINING for name in gone)


def test_a_pod_that_has_ended_goes_before_one_that_trains() -> None:
    p = run(resized(2, worker(0, **ended(1)), worker(1), worker(2), before=3))
    assert (created(p), vacant_of(p)) == ([], "0")


def test_of_pods_that_train_one_goes_that_must_leave_its_node() -> None:
    observed = resized(2, worker(0, node="n5"), worker(1), worker(2), before=3)
    observed = replace(observed, warnings={"n5": NodeWarning("taint spot")}, nodes_watched=True)
    p = run(observed)
    assert (deleted(p), created(p)) == (["bert-0-0"], [])


def test_a_pod_whose_agent_is_lost_goes_before_one_that_trains() -> None:
    observed = resized(2, worker(0), worker(1), worker(2), before=3)
    lost = replace(observed.link, lost_pods={"bert-0-0": NOW - 1})
    assert deleted(run(replace(observed, link=lost))) == ["bert-0-0"]


def test_without_a_report_pods_without_a_node_go_first() -> None:
    observed = replace(resized(1, pending(0), worker(1), worker(2), before=3), link=LinkView(since=NOW))
    assert deleted(run(observed)) == ["bert-0-0", "bert-2-0"]


def test_between_rounds_connected_nodes_stay() -> None:
    pods = (worker(0), worker(1), worker(2))
    observed = replace(resized(2, *pods, before=3), link=link(gathering(*pods[1:])))
    assert deleted(run(observed)) == ["bert-0-0"]


SHRUNK: Raw = {"incarnations": "0,0,0", "vacantIndices": [{"first": 0, "last": 0}]}
"""The status of a job whose indices are 1 and 2."""


def test_the_coordinator_counts_every_index_of_the_job() -> None:
    p = run(resized(2, worker(1), worker(2), before=2, **SHRUNK))
    assert (deleted(p), created(p)) == ([], [])
    assert p.operator_view is not None
    settings = p.operator_view.settings
    assert (settings.target, settings.desired_pods) == (2, 3)
    assert [(pod.index, pod.state) for pod in p.operator_view.pods] == [(1, PodState.RUNNING), (2, PodState.RUNNING)]


def test_a_job_that_grows_takes_vacant_indices_first() -> None:
    p = run(resized(4, worker(1), worker(2), before=2, **SHRUNK))
    assert created(p) == ["bert-0-1", "bert-3-0"]
    assert "vacantIndices" not in status_of(p)
    assert "PodReplaced" not in [event.reason for event in p.event_records]


def test_a_job_that_shrinks_again_keeps_to_the_rule() -> None:
    p = run(resized(1, pending(1), worker(2), before=2, **SHRUNK))
    assert (deleted(p), vacant_of(p)) == (["bert-1-0"], "0,1")


def test_a_lost_pod_of_such_a_job_is_replaced_under_its_index() -> None:
    p = run(resized(2, worker(1), worker(2, **ended(1)), before=2, **SHRUNK))
    assert created(p) == ["bert-2-1"]


def test_a_choice_that_status_names_is_not_made_again() -> None:
    """The operator ended before it deleted the pod; another one has a report that says something else."""
    observed = resized(2, worker(0), worker(1), worker(2), before=2, members=(0, 1), **SHRUNK)
    p = run(observed)
    assert (deleted(p), p.status is None or vacant_of(p)) == (["bert-0-0"], "0")


def test_a_pod_that_failed_before_its_index_was_given_up_is_not_charged_when_the_job_grows() -> None:
    failed = worker(0, **killed(1))
    vacant: Raw = {"incarnations": "0,0,0", "vacantIndices": [{"first": 0, "last": 0, "incarnation": 0}]}
    p = run(resized(3, failed, worker(1), worker(2), before=2, members=(1, 2), **vacant))
    assert created(p) == ["bert-0-1"]
    assert status_of(p).get("restarts", 0) == 0
    assert "WorkerFailed" not in [event.reason for event in p.event_records]


def test_a_pod_of_an_earlier_execution_is_not_charged() -> None:
    resumed = [condition("Suspended", value=False, reason="Resumed")]
    failed = replace(worker(0, **killed(1)), execution=1)
    known = status(executionAttempts=2, conditions=resumed)
    p = run(replace(steady(workers=(failed, worker(1))), job=job(status=known)))
    assert created(p) == ["bert-0-1"]
    assert status_of(p).get("restarts", 0) == 0


def test_an_index_that_has_got_a_pod_since_is_not_vacant() -> None:
    """After a rollback, an operator that knows no vacant indices made it."""
    stale: Raw = {"incarnations": "1,0,0", "vacantIndices": [{"first": 0, "last": 0, "incarnation": 0}]}
    p = run(resized(2, worker(0, 1), worker(1), before=2, **stale))
    assert (created(p), deleted(p)) == ([], [])


def test_a_missing_spare_of_a_job_that_has_no_room_keeps_its_name() -> None:
    """Each reconcile gave it another incarnation, and its back-off began again."""
    lacking = {"replicas": 3, "indices": "0,1"}
    spec = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3, "spares": 1}, "replicas": 3}
    known = status(incarnations="0,0,0,0", targetReplicas=2, scaledDown=lacking)
    pods = (pending(0), worker(2))
    observed = replace(steady(workers=pods, last_report=report(pods[1])), job=job(status=known, **spec))
    refused = replace(observed, refusals={"bert-3-0": Refusal(RefusalReason.QUOTA_EXCEEDED, "no", NOW + 60, NOW)})
    assert "bert-3-1" not in created(run(refused))


def test_a_resumed_job_begins_at_index_0() -> None:
    known = status(**SHRUNK, conditions=[condition("Suspended")], rendezvous={"newest": 1})
    observed = replace(steady(), job=job(status=known, **elastic(1, 8, 2)), workers=(), stores=(), link=LinkView())
    observed = replace(observed, children=Children())
    assert "vacantIndices" not in status_of(run(observed))


@pytest.mark.parametrize("written", ["0", [1], [{"first": 0}], [{"first": 1, "last": 0}], [{"first": -1, "last": 0}]])
def test_an_unreadable_list_of_vacant_indices_names_none_that_it_does_not_say(written: object) -> None:
    listed = [*written, {"first": 2, "last": 3}] if isinstance(written, list) else written
    found = job(status=status(vacantIndices=listed)).status.vacant
    assert found == ({2, 3} if isinstance(written, list) else set())


def test_indices_that_the_job_never_had_are_ignored() -> None:
    far = {"replicas": 2, "indices": "1,123456789012"}
    p = run(
        resized(2, worker(0), worker(1), before=2, scaledDown=far, vacantIndices=[{"first": 0, "last": 999999999999}])
    )
    assert deleted(p) == []


async def test_a_new_store_begins_with_the_spares_by_which_every_index_counts() -> None:
    """Else a node above the gap has no place until the operator's first view arrives."""
    cluster = Cluster(**elastic(1, 4, 2))
    await cluster.reconcile_for(5.0)
    before = {pod["metadata"]["name"] for pod in cluster.api.pods(Role.STORE)}
    known = job_status(cluster.api) | SHRUNK
    cluster.api.put(JOBS, {**cluster.api.objects[JOBS, "bert"], "status": known})
    for name in before:
        cluster.api.remove(PODS, name)
    await cluster.reconcile_for(30.0)
    stores = [pod for pod in cluster.api.pods(Role.STORE) if pod["metadata"]["name"] not in before]
    assert stores
    for pod in stores:
        variables = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        settings = codec.parse(RoundSettings, codec.loads(variables[Env.SETTINGS].encode()))
        assert (settings.target, settings.spares) == (2, 1)
