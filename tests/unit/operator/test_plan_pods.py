"""Plans for worker pods: what replaces them, what is charged, and which pods the store expects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Failure, FailureClass, InRound, Outcome, PodState, Report
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.actions import (
    CreateNodesService,
    CreateSecret,
    CreateStore,
    CreateStoreService,
    CreateWorker,
    DeletePod,
)
from elasticjob_operator.model.cluster.pods import CONTAINER_LOST, Pod, parse_pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Child, Children, LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.plan import Plan
from support.operator.build import (
    IMAGE,
    NOW,
    Raw,
    conditions_of,
    declared,
    elastic,
    ended,
    events_of,
    failure,
    gathering,
    job,
    link,
    raw_pod,
    report,
    run,
    status,
    status_of,
    steady,
    unschedulable,
    worker,
)


def test_a_new_job_gets_all_its_children_in_one_plan_and_status_names_them() -> None:
    p = run(Observed(job()))
    assert p.actions == (
        CreateSecret(),
        CreateNodesService(),
        CreateStoreService(0),
        CreateStore("bert-rdzv-0", 0),
        CreateWorker("bert-0-0", 0, 0),
        CreateWorker("bert-1-0", 1, 0),
    )
    status_ = status_of(p)
    assert status_["incarnations"] == "0,0"
    assert status_["rendezvous"] == {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0}
    assert (status_["phase"], status_["targetReplicas"], status_["runtimeImage"]) == ("Pending", 2, IMAGE)


def test_a_steady_job_has_an_empty_plan() -> None:
    first = run(steady())
    again = run(replace(steady(), job=job(status=status_of(first))))
    assert (first.actions, again.actions, again.status, again.event_records) == ((), (), None, ())


OTHER = worker(1)
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
LOST = {"bert_0_0": NOW - 4}

REPLACED: list[tuple[str, tuple[Pod, ...], bool, list[str]]] = [
    ("missing", (), False, []),
    ("being deleted", (worker(0, deleting=NOW + 30),), False, []),
    ("drained", (worker(0, **ended(143), conditions=[EVICTED]),), False, []),
    ("stopped by a signal, and not taken away", (worker(0, **ended(143)),), True, []),
    ("superseded", (worker(0, **ended(76)),), False, []),
    ("found no store", (worker(0, **ended(69)),), False, []),
    ("out of memory", (worker(0, **ended(137, "OOMKilled")),), True, []),
    ("the agent broke", (worker(0, **ended(70)),), True, []),
    ("exit code 0 without a declared outcome", (worker(0, **ended(0, "Completed")),), True, []),
    ("declared that it left", (worker(0, **ended(1, termination=declared(Outcome.LEFT))),), False, []),
    (
        "evicted",
        (worker(0, **ended(137), conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "Evicted"}]),),
        False,
        [],
    ),
    ("no container ran", (worker(0, phase="Failed", container={"state": {}}),), False, []),
]


@pytest.mark.parametrize(("name", "pods", "charged", "deleted"), REPLACED, ids=[r[0] for r in REPLACED])
def test_a_pod_that_is_missing_ended_or_being_deleted_is_replaced_at_once(
    name: str, pods: tuple[Pod, ...], charged: bool, deleted: list[str]
) -> None:
    p = run(steady(workers=(*pods, OTHER), last_report=report(OTHER)))
    assert CreateWorker("bert-0-1", 0, 1) in p.actions
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == deleted
    status_ = status_of(p)
    assert status_["incarnations"] == "1,0"
    assert (status_["restarts"], status_["restartsCountTowardsMax"]) == ((1, 1) if charged else (0, 0))
    assert p.operator_view is not None
    assert [(pod.pod, pod.state) for pod in p.operator_view.pods] == [
        ("bert-0-1", PodState.STARTING),
        ("bert-1-0", PodState.RUNNING),
    ]
    assert p.operator_view.charged == int(charged)


def test_a_pod_that_vanished_while_operator_and_store_were_down_is_replaced_and_not_charged() -> None:
    p = run(replace(steady(workers=(OTHER,)), stores=(), link=LinkView(connected=False, since=NOW)))
    assert CreateWorker("bert-0-1", 0, 1) in p.actions
    status_ = status_of(p)
    assert (status_["restarts"], status_.get("lastFailure")) == (0, None)


def test_pods_that_fail_together_are_charged_once() -> None:
    first = run(steady(workers=(worker(0, **ended(137, "OOMKilled")), OTHER), last_report=report(OTHER)))
    later = replace(
        steady(workers=(worker(0, 1), worker(1, **ended(137, "OOMKilled"))), last_report=gathering()),
        job=job(status=status_of(first)),
    )
    assert status_of(run(later))["restarts"] == 1
    later_pod = replace(later, workers=(worker(0, 1, **ended(70), failed_starts=1), worker(1)))
    assert status_of(run(later_pod, NOW + 9))["restarts"] == 2


def test_a_superseded_pod_that_still_runs_is_deleted() -> None:
    p = run(steady(workers=(worker(0), worker(0, 1), OTHER), incarnations="1,0"))
    assert p.actions == (DeletePod("bert-0-0", "uid-bert-0-0", "a newer pod has its index"),)


def test_the_newest_ended_pod_of_each_index_is_kept_for_its_log() -> None:
    pods = (worker(0, 0, **ended(70)), worker(0, 1, **ended(70)), worker(0, 2), OTHER)
    p = run(steady(workers=pods, incarnations="2,0"))
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-0-0"]


def test_a_pod_that_a_node_rejected_is_replaced_after_a_delay() -> None:
    rejected = worker(0, phase="Failed", container={"state": {}}, created=NOW - 2)
    observed = steady(workers=(rejected, OTHER), last_report=report(OTHER))
    early = run(observed)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(8.0)
    assert run(observed, NOW + 8).actions == (CreateWorker("bert-0-1", 0, 1),)


# ---- lost nodes ------------------------------------------------------------------------------------------------


def test_a_lost_agent_gets_a_grace_period_then_its_node_is_avoided() -> None:
    lost = replace(steady(), link=link(report(OTHER, lost_pods=("bert-0-0",)), bert_0_0=NOW - 1))
    early = run(lost)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(2.0)
    late = run(lost, NOW + 2)
    assert late.actions == (
        CreateWorker("bert-0-1", 0, 1, avoid=("n1",)),
        DeletePod("bert-0-0", "uid-bert-0-0", "a newer pod has its index"),
    )
    assert [(n["name"], n["reason"]) for n in status_of(late)["avoidedNodes"]] == [("n1", "NodeLost")]
    failed = status_of(late)["lastFailure"]
    assert (failed["class"], failed["node"], failed["pod"]) == ("NodeLost", "n1", "bert-0-0")
    assert status_of(late)["restarts"] == 0


def test_no_pod_is_lost_by_the_report_of_an_unavailable_store() -> None:
    lost = replace(steady(), link=replace(link(report(OTHER), since=NOW - 1, bert_0_0=NOW - 60), connected=False))
    assert run(lost).actions == ()


def avoiding(returned: bool, pod: Pod) -> Observed:
    """Return a job that avoids n1, lost at NOW, with `pod`; `returned`: the kubelet of n1 has renewed its lease."""
    entry = {"name": "n1", "until": "2027-01-16T08:00:00Z", "why": "lost"}
    observed = steady(workers=(pod, worker(1, node="n2")), avoidedNodes=[entry], incarnations="1,0")
    return replace(observed, returned_nodes=frozenset({"n1"} if returned else ()))


PENDING = unschedulable()
UNHEALTHY = failure("bert-0-0", kind=FailureClass.DEVICE_UNHEALTHY, rank=None, exit_code=None, message="GPU 1 is lost")
DECLARED_UNHEALTHY = worker(0, **ended(143, termination=declared(Outcome.LEFT, UNHEALTHY)))


@pytest.mark.parametrize(
    ("pod", "last_report"),
    [
        (worker(0), report(OTHER, unhealthy=(UNHEALTHY,))),
        (worker(0, deleting=NOW + 30), report(OTHER, unhealthy=(UNHEALTHY,))),
        (DECLARED_UNHEALTHY, report(OTHER)),
        (worker(0, **ended(143, termination=declared(Outcome.LEFT, UNHEALTHY)), created=NOW - 1), gathering()),
    ],
    ids=["still runs", "is being deleted", "has ended", "ended at its start"],
)
def test_a_pod_on_an_unhealthy_node_is_replaced_elsewhere_at_once_and_not_charged(
    pod: Pod, last_report: Report
) -> None:
    p = run(steady(workers=(pod, worker(1, node="n2")), last_report=last_report))
    assert CreateWorker("bert-0-1", 0, 1, avoid=("n1",)) in p.actions
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ([] if pod.deleting or pod.end else ["bert-0-0"])
    status_ = status_of(p)
    (avoided,) = status_["avoidedNodes"]
    assert (avoided["name"], avoided["reason"]) == ("n1", "DeviceUnhealthy")
    assert (status_["restarts"], status_["lastFailure"]["class"], status_["lastFailure"]["node"]) == (
        0, "DeviceUnhealthy", "n1",
    )  # fmt: skip
    assert "DeviceUnhealthy" in events_of(p)


@pytest.mark.parametrize(("age", "replaced"), [(1.0, False), (59.0, False), (60.0, True)])
@pytest.mark.parametrize("ends", [{}, ended(143, termination=declared(Outcome.LEFT, UNHEALTHY))])
def test_a_pod_that_was_placed_on_the_unhealthy_node_that_it_avoids_is_replaced_once_a_minute(
    ends: Raw, age: float, replaced: bool
) -> None:
    pod = worker(0, avoids="n1", created=NOW - age, **ends)
    p = run(steady(workers=(pod, worker(1, node="n2")), last_report=report(OTHER, unhealthy=(UNHEALTHY,))))
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] == ["bert-0-1"] * replaced
    assert p.requeue_after is not None


@pytest.mark.parametrize(("later", "avoided"), [(3600.0, True), (86390.0, True), (86410.0, False)])
def test_an_unhealthy_node_is_avoided_for_a_day_though_its_kubelet_renews_its_lease(
    later: float, avoided: bool
) -> None:
    entry = {"name": "n1", "until": "2027-01-16T08:00:00Z", "why": "GPU 1 is lost", "reason": "DeviceUnhealthy"}
    pod = worker(0, 1, avoids="n1", **PENDING)
    observed = steady(workers=(pod, worker(1, node="n2")), avoidedNodes=[entry], incarnations="1,0")
    p = run(replace(observed, leases={"n1": NOW + later}), NOW + later)
    assert ([a.name for a in p.actions if isinstance(a, CreateWorker)] == []) is avoided
    if avoided:
        fault = conditions_of(p)["FullyScaled"]
        assert fault["reason"] == "NodeFault"
        assert "n1 is avoided until 2027-01-16T08:00:00Z: GPU 1 is lost" in fault["message"]


def test_status_keeps_the_newest_avoided_nodes() -> None:
    times = {"since": timestamp(NOW - 9), "until": timestamp(NOW + 900)}
    known = [{"name": f"old-{n}", "reason": "DeviceUnhealthy", "why": "", **times} for n in range(32)]
    workers = (worker(0), worker(1, node="n2"))
    p = run(steady(workers=workers, last_report=report(OTHER, unhealthy=(UNHEALTHY,)), avoidedNodes=known))
    names = [node["name"] for node in status_of(p)["avoidedNodes"]]
    assert (len(names), names[-1]) == (32, "n1")


def test_avoid_node_seconds_sets_how_long_an_unhealthy_node_is_avoided() -> None:
    observed = steady(workers=(worker(0), worker(1, node="n2")), last_report=report(OTHER, unhealthy=(UNHEALTHY,)))
    shorter = replace(observed, job=job(status=status(), failurePolicy={"avoidNodeSeconds": 600}))
    (avoided,) = status_of(run(shorter))["avoidedNodes"]
    assert (avoided["since"], avoided["until"]) == ("2027-01-15T08:00:00Z", "2027-01-15T08:10:00Z")
    pod = worker(0, 1, avoids="n1", **PENDING)
    # A changed avoidNodeSeconds does not apply to nodes that are avoided already.
    later = steady(workers=(pod, worker(1, node="n2")), avoidedNodes=[avoided], incarnations="1,0")
    assert run(later, NOW + 599).actions == ()
    assert run(later, NOW + 601).actions[0] == CreateWorker("bert-0-2", 0, 2)


SUSPECTED = replace(UNHEALTHY, message="processes in an uninterruptible sleep 90 s after SIGKILL: 7", suspected=True)
OTHER_SUSPECTED = replace(SUSPECTED, pod="bert-1-0")
DAY = 86400


def suspected(*failures: Failure, at: float = NOW, **status_: object) -> Raw:
    """Return the next status of a job with two pods on n1, for which these failures are reported."""
    workers = (worker(0, node="n1"), worker(1, node="n1"))
    p = run(steady(workers=workers, last_report=report(*workers, unhealthy=failures), **status_), at)
    return status_of(p)


def test_the_first_suspicion_moves_the_pod_and_does_not_avoid_the_machine_for_long() -> None:
    first = suspected(SUSPECTED)
    (avoided,), (suspect,) = first["avoidedNodes"], first["suspectNodes"]
    assert (avoided["name"], avoided["since"], avoided["until"]) == (
        "n1", "2027-01-15T08:00:00Z", "2027-01-15T08:01:00Z",
    )  # fmt: skip
    assert (suspect["name"], suspect["until"]) == ("n1", "2027-01-16T08:00:00Z")
    assert suspect["why"] == SUSPECTED.message
    known = {name: first[name] for name in ("avoidedNodes", "suspectNodes")}
    later = steady(workers=(worker(0, 1, avoids="n1", **PENDING), worker(1, node="n2")), incarnations="1,0", **known)
    waiting = run(later, NOW + 59)
    assert waiting.actions == ()
    assert waiting.requeue_after == pytest.approx(1.0)
    assert run(later, NOW + 61).actions[0] == CreateWorker("bert-0-2", 0, 2), "the machine may be used again"


@pytest.mark.parametrize(
    ("at", "avoided_for"),
    [(NOW + 30, 90), (NOW + 61, 61 + DAY), (NOW + DAY - 1, 2 * DAY - 1), (NOW + DAY + 1, DAY + 61)],
    ids=["the same one, of another pod", "soon after", "within the day", "a day later"],
)
def test_the_next_suspicion_avoids_the_machine(at: float, avoided_for: float) -> None:
    first = suspected(SUSPECTED)
    known = {name: first[name] for name in ("avoidedNodes", "suspectNodes")}
    (avoided,) = suspected(OTHER_SUSPECTED, at=at, **known)["avoidedNodes"]
    assert avoided["until"] == timestamp(NOW + avoided_for)


def test_two_pods_with_one_suspicion_are_the_first_one() -> None:
    (avoided,) = suspected(SUSPECTED, OTHER_SUSPECTED)["avoidedNodes"]
    assert avoided["until"] == "2027-01-15T08:01:00Z"


def test_a_proven_fault_avoids_the_machine_at_once_whatever_was_suspected() -> None:
    first = suspected(SUSPECTED)
    known = {name: first[name] for name in ("avoidedNodes", "suspectNodes")}
    (avoided,) = suspected(replace(UNHEALTHY, pod="bert-1-0"), at=NOW + 10, **known)["avoidedNodes"]
    assert avoided["until"] == timestamp(NOW + 10 + DAY)


def test_a_suspicion_is_forgotten_after_the_time_for_which_nodes_are_avoided() -> None:
    known = suspected(SUSPECTED)["suspectNodes"]
    assert suspected(at=NOW + DAY - 1, suspectNodes=known)["suspectNodes"] == known
    assert suspected(at=NOW + DAY + 1, suspectNodes=known).get("suspectNodes", []) == []


DRAINED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
COLLECTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}


def failed_by_kubelet(reason: str) -> Raw:
    raw = raw_pod(0, phase="Failed", container={"state": {}})
    raw["status"] |= {"reason": reason, "message": "The node was low on resource: memory."}
    return raw


@pytest.mark.parametrize(
    ("pod", "kind", "reason"),
    [
        (worker(0, deleting=NOW + 30, conditions=[DRAINED]), "Preempted", "EvictionByEvictionAPI"),
        (worker(0, deleting=NOW + 30, conditions=[PREEMPTED]), "Preempted", "PreemptionByScheduler"),
        (worker(0, **ended(143), conditions=[PREEMPTED]), "Preempted", "PreemptionByScheduler"),
        (worker(0, deleting=NOW + 30, conditions=[COLLECTED]), "NodeLost", "DeletionByPodGC"),
        (parse_pod(failed_by_kubelet("Evicted")), "Preempted", "Evicted"),
        (parse_pod(failed_by_kubelet("Terminated")), "Preempted", "Terminated"),
        (parse_pod(failed_by_kubelet("OutOfcpu")), "StartError", "OutOfcpu"),
        (worker(0, **ended(255, "Unknown")), "NodeLost", "NodeLost"),
        (worker(0, **ended(137, CONTAINER_LOST, InRound(RoundId(1, 0, 1)))), "NodeLost", "NodeLost"),
        (worker(0, **ended(137, "OOMKilled")), "OOMKilled", "OOMKilled"),
        (worker(0, deleting=NOW + 30), None, None),
        (worker(0, **ended(143, termination=declared(Outcome.LEFT))), None, None),
    ],
    ids=lambda v: v.name if isinstance(v, Pod) else str(v),
)
def test_a_pod_that_kubernetes_ended_is_recorded_with_the_reason_of_kubernetes(
    pod: Pod, kind: str | None, reason: str | None
) -> None:
    status_ = status_of(run(steady(workers=(pod, OTHER), last_report=report(OTHER))))
    failed = status_.get("lastFailure", {})
    assert (failed.get("class"), failed.get("reason")) == (kind, reason)
    assert status_["restarts"] == int(kind == "OOMKilled")
    assert status_.get("recentFailures", []) == ([failed] if failed else [])


@pytest.mark.parametrize(
    ("name", "returned", "pod", "replaced"),
    [
        ("lease not renewed", False, worker(0, 1, avoids="n1", **PENDING), False),
        ("lease renewed", True, worker(0, 1, avoids="n1", **PENDING), True),
        ("lease renewed, and the pod is scheduled", True, worker(0, 1, avoids="n1", node="n2"), False),
        ("scheduled there before the loss", False, worker(0, 1, phase="Pending", node="n1"), True),
        ("placed there though it avoids the node", False, worker(0, 1, phase="Pending", avoids="n1", node="n1"), False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_avoidance_ends_when_the_kubelet_renews_its_lease(name: str, returned: bool, pod: Pod, replaced: bool) -> None:
    p = run(avoiding(returned, pod), NOW + 10)
    created = [a.name for a in p.actions if isinstance(a, CreateWorker)]
    assert created == (["bert-0-2"] if replaced else [])


@pytest.mark.parametrize(("age", "replaced"), [(5.0, False), (16.0, True)])
def test_a_pod_unknown_to_a_new_store_is_lost_when_the_lease_of_its_node_is_late_too(
    age: float, replaced: bool
) -> None:
    observed = replace(steady(last_report=report(OTHER)), leases={"n1": NOW - age})
    assert [type(a) for a in run(observed).actions] == ([CreateWorker, DeletePod] if replaced else [])


@pytest.mark.parametrize(("age", "forced"), [(20.0, False), (41.0, True)])
@pytest.mark.parametrize("grace_left", [-1, 100])
def test_a_terminating_pod_is_force_deleted_only_when_its_kubelet_is_down(
    age: float, forced: bool, grace_left: int
) -> None:
    stuck = worker(0, 0, deleting=NOW + grace_left, node="n9")
    observed = replace(steady(workers=(stuck, worker(0, 1), OTHER), incarnations="1,0"), leases={"n9": NOW - age})
    assert [a.force for a in run(observed).actions if isinstance(a, DeletePod)] == ([True] if forced else [])


# ---- scaling ---------------------------------------------------------------------------------------------------


def test_scale_down_deletes_the_highest_indices_and_reports_them_as_draining() -> None:
    pods = (worker(0), worker(1), worker(2))
    observed = replace(
        steady(workers=pods, incarnations="0,0,0", targetReplicas=3),
        job=job(status=status(incarnations="0,0,0", targetReplicas=3), **elastic(1, 4, 2)),
    )
    p = run(observed)
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-2-0"]
    assert p.operator_view is not None
    assert {pod.pod: pod.state for pod in p.operator_view.pods}["bert-2-0"] is PodState.DRAINING
    assert p.operator_view.settings.target == 2
    assert (status_of(p)["targetReplicas"], status_of(p)["incarnations"]) == (2, "0,0,0")
    assert "lastScaleTime" in status_of(p)
    assert "ScalingDown" in events_of(p)


def test_scale_up_again_never_reuses_a_name() -> None:
    observed = replace(steady(), job=job(status=status(incarnations="0,0,0"), **elastic(1, 4, 4)))
    p = run(observed)
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] == ["bert-2-1", "bert-3-0"]
    assert (status_of(p)["phase"], [c["reason"] for c in status_of(p)["conditions"]][2]) == ("Scaling", "ScalingUp")
    assert "PodReplaced" not in events_of(p), "the pod of index 2 was removed on purpose"


def spared(spares: int) -> dict[str, Any]:
    return {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 2, "spares": spares}, "replicas": 2}


@pytest.mark.parametrize(
    ("before", "spares", "created", "deleted", "replaced"),
    [
        (1, 2, ["bert-3-1"], [], False),
        (1, 1, [], [], False),
        (2, 2, ["bert-3-1"], [], True),
        (1, 0, [], ["bert-2-0"], False),
    ],
    ids=["raised", "unchanged", "a spare is missing", "lowered"],
)
def test_more_spares_are_no_lost_pods(
    before: int, spares: int, created: list[str], deleted: list[str], replaced: bool
) -> None:
    """The job had a second spare once, so status knows its index."""
    pods = (worker(0), worker(1), worker(2))
    outside = ",".join(map(str, range(2, 2 + before)))
    known = status(incarnations="0,0,0,0", selector=f"elasticjob.dev/index notin ({outside})")
    p = run(replace(steady(workers=pods, last_report=report(*pods[:2])), job=job(status=known, **spared(spares))))
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] == created
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == deleted
    assert ("PodReplaced" in events_of(p)) == replaced


def test_a_missing_pod_of_a_size_that_stays_is_replaced_with_an_event() -> None:
    p = run(replace(steady(), job=job(status=status(incarnations="0,0,0", targetReplicas=3), **elastic(1, 4, 3))))
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] == ["bert-2-1"]
    (event,) = [e.message for e in p.event_records if e.reason == "PodReplaced"]
    assert event == "bert-2-0 no longer exists; bert-2-1 replaces it"


@pytest.mark.parametrize("trained", [False, True])
def test_pods_that_an_operator_never_created_are_not_called_lost(trained: bool) -> None:
    """It ended after its first write of status. Its successor does not know whether a pod had these names."""
    nothing = replace(steady(workers=(), rendezvousRound=int(trained)), stores=(), link=LinkView())
    p = run(replace(nothing, standby_link=LinkView()))
    created = [a.name for a in p.actions if isinstance(a, (CreateStore, CreateWorker))]
    assert created == ["bert-rdzv-2", "bert-0-1", "bert-1-1"]
    assert ("StoreLost" in events_of(p)) == ("PodReplaced" in events_of(p)) == trained


# ---- spares ----------------------------------------------------------------------------------------------------


def elastic_with_spares(*, low: int = 1, replicas: int = 2, spares: int = 1) -> Raw:
    fields = elastic(low, 4, replicas)
    fields["elasticPolicy"]["spares"] = spares
    return fields


def scaled(p: Plan) -> tuple[str, str, str]:
    found = conditions_of(p)["FullyScaled"]
    return found["status"], found["reason"], found["message"]


def with_spare(*pods: Pod, active: int = 2, **fields: Any) -> Observed:
    """Return a job with one spare: the first `active` pods train, the others are standby."""
    nodes = report(*pods).nodes
    nodes = tuple(replace(n, member=i < active) for i, n in enumerate(nodes))
    last_report = report(*pods, nodes=nodes, active=active, world_size=active)
    observed = steady(workers=pods, last_report=last_report)
    return replace(observed, job=job(status=status(**fields), **elastic_with_spares()))


def test_spares_are_added_to_the_target_lowest_index_first() -> None:
    p = run(Observed(job(**elastic_with_spares(spares=2))))
    assert [a.index for a in p.actions if isinstance(a, CreateWorker)] == [0, 1, 2, 3]
    assert (status_of(p)["targetReplicas"], status_of(p)["incarnations"]) == (2, "0,0,0,0")


def test_a_job_is_fully_scaled_with_its_spares_and_without_them() -> None:
    pods = (worker(0), worker(1), worker(2))
    p = run(with_spare(*pods, incarnations="0,0,0"))
    assert scaled(p) == ("True", "AtDesiredReplicas", "training on 2 of 2 pods; standby spares: 1 of 1")
    assert [status_of(p)[n] for n in ("replicas", "active", "ready", "standby")] == [2, 2, 3, 1]
    assert p.operator_view is not None
    assert (p.operator_view.settings.target, p.operator_view.settings.spares, len(p.operator_view.pods)) == (2, 1, 3)
    scarce = with_spare(worker(0), worker(1), incarnations="0,0,0")
    p = run(replace(scarce, workers=(*scarce.workers, worker(2, **unschedulable()))))
    assert scaled(p) == ("True", "AtDesiredReplicas", "training on 2 of 2 pods; standby spares: 0 of 1")
    assert (status_of(p)["phase"], events_of(p, warning=True)) == ("Running", [])


def test_a_job_stays_fully_scaled_while_the_pod_that_a_spare_stands_in_for_is_replaced() -> None:
    p = run(with_spare(worker(0), worker(2), incarnations="0,0,0"))
    assert [a for a in p.actions if isinstance(a, CreateWorker)] == [CreateWorker("bert-1-1", 1, 1)]
    assert (status_of(p)["incarnations"], status_of(p)["restarts"], scaled(p)[0]) == ("0,1,0", 0, "True")


def test_a_spare_counts_towards_the_minimum_when_another_pod_is_unschedulable() -> None:
    pods = (worker(0), worker(1, **unschedulable()), worker(2))
    observed = replace(with_spare(*pods, incarnations="0,0,0"), link=link(gathering(pods[0], pods[2])))
    p = run(replace(observed, job=job(status=status(incarnations="0,0,0"), **elastic_with_spares(low=2))))
    assert conditions_of(p)["Running"]["reason"] == "WaitingForMinReplicas"


def test_lowering_spares_deletes_the_highest_indices() -> None:
    pods = (worker(0), worker(1), worker(2))
    observed = with_spare(*pods, incarnations="0,0,0")
    p = run(replace(observed, job=job(status=status(incarnations="0,0,0"), **elastic(1, 4, 2))))
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-2-0"]
    assert p.operator_view is not None
    assert {pod.pod: pod.state for pod in p.operator_view.pods}["bert-2-0"] is PodState.DRAINING
    assert scaled(p)[1] == "ScalingDown"


@pytest.mark.parametrize(("replicas", "target"), [(None, 4), (1, 2), (9, 4), (3, 3)])
def test_the_target_stays_within_the_policy(replicas: int | None, target: int) -> None:
    fields = elastic(2, 4, replicas)
    raw = job(**({"replicas": None} | fields))
    assert raw.spec is not None
    assert raw.spec.target == target


# ---- refused children ------------------------------------------------------------------------------------------


def test_a_refused_pod_is_created_again_under_its_name_after_a_delay() -> None:
    refused = {"bert-0-0": Refusal(RefusalReason.QUOTA_EXCEEDED, "pods bert-0-0 is forbidden: quota", NOW + 5, NOW)}
    observed = replace(steady(workers=(OTHER,), last_report=gathering(OTHER)), refusals=refused)
    early = run(observed)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(5.0)
    assert conditions_of(early)["Running"]["reason"] == "QuotaExceeded"
    assert run(observed, NOW + 5).actions == (CreateWorker("bert-0-0", 0, 0),)


def test_a_pod_name_that_another_owner_uses_is_skipped() -> None:
    refused = {"bert-0-0": Refusal(RefusalReason.NAME_TAKEN, "taken", NOW, NOW)}
    p = run(replace(steady(workers=(OTHER,)), refusals=refused))
    assert p.actions == (CreateWorker("bert-0-1", 0, 1),)


def test_a_service_of_another_owner_blocks_the_job_and_is_left_alone() -> None:
    children = Children("", Child("x", ours=False), None)
    p = run(Observed(job(), children=children))
    assert p.actions == ()
    status_ = status_of(p)
    assert "incarnations" not in status_ or status_["incarnations"] == ""
    assert conditions_of(p)["Running"]["reason"] == "NameTaken"


def test_a_job_being_deleted_has_an_empty_plan() -> None:
    assert run(Observed(replace(job(), deleting=True))) == Plan()
