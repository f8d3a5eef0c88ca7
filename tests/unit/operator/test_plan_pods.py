"""Worker pods: given what a index has, what becomes of it, whether it is charged, and what the store is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob.contract.messages import FailureClass, Outcome, PodState, Report
from elasticjob_operator.actions import (
    CreateNodesService,
    CreateSecret,
    CreateStore,
    CreateStoreService,
    CreateWorker,
    DeletePod,
)
from elasticjob_operator.model.observed import Child, Children, LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.model.pods import Pod, parse_pod
from elasticjob_operator.plan import Plan, plan
from support.operator_build import (
    IMAGE,
    NOW,
    Raw,
    declared,
    elastic,
    ended,
    failure,
    gathering,
    job,
    link,
    raw_pod,
    report,
    status,
    steady,
    unschedulable,
    worker,
)


def run(observed: Observed, now: float = NOW) -> Plan:
    return plan(observed, IMAGE, now)


def told(p: Plan) -> dict[str, Any]:
    assert p.status is not None
    return dict(p.status)


def test_a_new_job_gets_everything_at_once_and_status_names_it_first() -> None:
    p = run(Observed(job()))
    assert p.actions == (
        CreateSecret(),
        CreateNodesService(),
        CreateStoreService(0),
        CreateStore("bert-rdzv-0", 0),
        CreateWorker("bert-0-0", 0, 0),
        CreateWorker("bert-1-0", 1, 0),
    )
    status_ = told(p)
    assert status_["incarnations"] == "0,0"
    assert status_["rendezvous"] == {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0}
    assert (status_["phase"], status_["targetReplicas"], status_["runtimeImage"]) == ("Pending", 2, IMAGE)


def test_nothing_to_do_is_an_empty_plan() -> None:
    first = run(steady())
    again = run(replace(steady(), job=job(status=told(first))))
    assert (first.actions, again.actions, again.status, again.event_records) == ((), (), None, ())


OTHER = worker(1)
LOST = {"bert_0_0": NOW - 4}

REPLACED: list[tuple[str, tuple[Pod, ...], bool, list[str]]] = [
    ("gone", (), False, []),
    ("being deleted", (worker(0, deleting=NOW + 30),), False, []),
    ("left on SIGTERM", (worker(0, **ended(143)),), False, []),
    ("superseded", (worker(0, **ended(76)),), False, []),
    ("found no round", (worker(0, **ended(75)),), False, []),
    ("killed for memory", (worker(0, **ended(137, "OOMKilled")),), True, []),
    ("agent broke", (worker(0, **ended(70)),), True, []),
    ("exit 0 that nobody declared", (worker(0, **ended(0, "Completed")),), True, []),
    ("said it left", (worker(0, **ended(1, said=declared(Outcome.LEFT))),), False, []),
    (
        "evicted",
        (worker(0, **ended(137), conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "Evicted"}]),),
        False,
        [],
    ),
    ("no container ever ran", (worker(0, phase="Failed", container={"state": {}}),), False, []),
]


@pytest.mark.parametrize(("name", "pods", "charged", "deleted"), REPLACED, ids=[r[0] for r in REPLACED])
def test_a_pod_that_is_no_more_has_a_successor_at_once(
    name: str, pods: tuple[Pod, ...], charged: bool, deleted: list[str]
) -> None:
    p = run(steady(workers=(*pods, OTHER), told=report(OTHER)))
    assert CreateWorker("bert-0-1", 0, 1) in p.actions
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == deleted
    status_ = told(p)
    assert status_["incarnations"] == "1,0"
    assert (status_["restarts"], status_["restartsCountTowardsMax"]) == ((1, 1) if charged else (0, 0))
    assert p.operator_view is not None
    assert [(f.pod, f.state) for f in p.operator_view.pods] == [
        ("bert-0-1", PodState.STARTING),
        ("bert-1-0", PodState.RUNNING),
    ]
    assert p.operator_view.charged == int(charged)


def test_a_pod_that_vanished_while_nobody_looked_is_replaced_and_not_charged() -> None:
    """Operator and store were both down: nothing tells of it but its absence."""
    p = run(replace(steady(workers=(OTHER,)), stores=(), link=LinkView(connected=False, since=NOW)))
    assert CreateWorker("bert-0-1", 0, 1) in p.actions
    status_ = told(p)
    assert (status_["restarts"], status_.get("lastFailure")) == (0, None)


def test_pods_that_fail_together_are_charged_once() -> None:
    first = run(steady(workers=(worker(0, **ended(137, "OOMKilled")), OTHER), told=report(OTHER)))
    later = replace(
        steady(workers=(worker(0, 1), worker(1, **ended(137, "OOMKilled"))), told=gathering()),
        job=job(status=told(first)),
    )
    assert told(run(later))["restarts"] == 1
    fresh_one = replace(later, workers=(worker(0, 1, **ended(70), created=NOW + 5), worker(1)))
    assert told(run(fresh_one, NOW + 9))["restarts"] == 2


def test_a_superseded_pod_that_still_runs_is_deleted() -> None:
    p = run(steady(workers=(worker(0), worker(0, 1), OTHER), incarnations="1,0"))
    assert p.actions == (
        DeletePod("bert-0-0", "uid-bert-0-0", "a newer pod has its index, or the job does not want it any more"),
    )


def test_of_ended_pods_the_newest_of_each_slot_stays_for_its_log() -> None:
    pods = (worker(0, 0, **ended(70)), worker(0, 1, **ended(70)), worker(0, 2), OTHER)
    p = run(steady(workers=pods, incarnations="2,0"))
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-0-0"]


def test_a_node_that_turns_pods_away_does_not_make_it_spin() -> None:
    turned_away = worker(0, phase="Failed", container={"state": {}}, created=NOW - 2)
    observed = steady(workers=(turned_away, OTHER), told=report(OTHER))
    early = run(observed)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(8.0)
    assert run(observed, NOW + 8).actions == (CreateWorker("bert-0-1", 0, 1),)


# ---- lost nodes ------------------------------------------------------------------------------------------------


def test_a_lost_agent_gets_a_moment_then_its_node_is_avoided() -> None:
    lost = replace(steady(), link=link(report(OTHER, lost_pods=("bert-0-0",)), bert_0_0=NOW - 1))
    early = run(lost)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(2.0)
    late = run(lost, NOW + 2)
    assert late.actions == (
        CreateWorker("bert-0-1", 0, 1, avoid=("n1",)),
        DeletePod("bert-0-0", "uid-bert-0-0", "a newer pod has its index, or the job does not want it any more"),
    )
    assert [(n["name"], n["reason"]) for n in told(late)["avoidedNodes"]] == [("n1", "NodeLost")]
    lost = told(late)["lastFailure"]
    assert (lost["class"], lost["node"], lost["pod"]) == ("NodeLost", "n1", "bert-0-0")
    assert told(late)["restarts"] == 0


def test_a_report_of_a_store_that_cannot_be_asked_loses_nobody() -> None:
    lost = replace(steady(), link=replace(link(report(OTHER), since=NOW - 1, bert_0_0=NOW - 60), connected=False))
    assert run(lost).actions == ()


def avoiding(lease: float | None, pod: Pod) -> Observed:
    entry = {"name": "n1", "until": "2027-01-16T08:00:00Z", "why": "lost"}  # lost at NOW
    observed = steady(workers=(pod, worker(1, node="n2")), avoidedNodes=[entry], incarnations="1,0")
    return replace(observed, leases={} if lease is None else {"n1": lease})


WAITS = unschedulable()
UNFIT = failure("bert-0-0", kind=FailureClass.DEVICE_UNHEALTHY, rank=None, exit_code=None, message="GPU 1 is lost")
SAID_UNFIT = worker(0, **ended(143, said=declared(Outcome.LEFT, UNFIT)))


@pytest.mark.parametrize(
    ("pod", "told_by"),
    [
        (worker(0), report(OTHER, unhealthy=(UNFIT,))),
        (worker(0, deleting=NOW + 30), report(OTHER, unhealthy=(UNFIT,))),
        (SAID_UNFIT, report(OTHER)),
        (worker(0, **ended(143, said=declared(Outcome.LEFT, UNFIT)), created=NOW - 1), gathering()),
    ],
    ids=["still runs", "is being deleted", "has ended", "ended at its start"],
)
def test_a_node_that_is_not_fit_is_replaced_elsewhere_at_once_and_not_charged(pod: Pod, told_by: Report) -> None:
    p = run(steady(workers=(pod, worker(1, node="n2")), told=told_by))
    assert CreateWorker("bert-0-1", 0, 1, avoid=("n1",)) in p.actions
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ([] if pod.deleting or pod.end else ["bert-0-0"])
    status_ = told(p)
    (avoided,) = status_["avoidedNodes"]
    assert (avoided["name"], avoided["reason"]) == ("n1", "DeviceUnhealthy")
    assert (status_["restarts"], status_["lastFailure"]["class"], status_["lastFailure"]["node"]) == (
        0, "DeviceUnhealthy", "n1",
    )  # fmt: skip
    assert "DeviceUnhealthy" in [n.reason for n in p.event_records]


@pytest.mark.parametrize(("later", "avoided"), [(3600.0, True), (86390.0, True), (86410.0, False)])
def test_a_node_that_is_not_fit_is_avoided_for_a_day_whatever_its_kubelet_says(later: float, avoided: bool) -> None:
    entry = {"name": "n1", "until": "2027-01-16T08:00:00Z", "why": "GPU 1 is lost", "reason": "DeviceUnhealthy"}
    pod = worker(0, 1, avoids="n1", **WAITS)
    observed = steady(workers=(pod, worker(1, node="n2")), avoidedNodes=[entry], incarnations="1,0")
    p = run(replace(observed, leases={"n1": NOW + later}), NOW + later)
    assert ([a.name for a in p.actions if isinstance(a, CreateWorker)] == []) is avoided
    if avoided:
        fault = next(c for c in told(p)["conditions"] if c["type"] == "FullyScaled")
        assert fault["reason"] == "NodeFault"
        assert "n1 is avoided until 2027-01-16T08:00:00Z: GPU 1 is lost" in fault["message"]


def test_how_long_a_node_that_is_not_fit_is_avoided_is_the_users_to_say() -> None:
    observed = steady(workers=(worker(0), worker(1, node="n2")), told=report(OTHER, unhealthy=(UNFIT,)))
    impatient = replace(observed, job=job(status=status(), failurePolicy={"avoidNodeSeconds": 600}))
    (avoided,) = told(run(impatient))["avoidedNodes"]
    assert (avoided["since"], avoided["until"]) == ("2027-01-15T08:00:00Z", "2027-01-15T08:10:00Z")
    pod = worker(0, 1, avoids="n1", **WAITS)
    # A change does not touch what is avoided already.
    later = steady(workers=(pod, worker(1, node="n2")), avoidedNodes=[avoided], incarnations="1,0")
    assert run(later, NOW + 599).actions == ()
    assert run(later, NOW + 601).actions[0] == CreateWorker("bert-0-2", 0, 2)


DRAINED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
TAKEN = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
COLLECTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}


def taken_by_kubelet(reason: str) -> Raw:
    raw = raw_pod(0, phase="Failed", container={"state": {}})
    raw["status"] |= {"reason": reason, "message": "The node was low on resource: memory."}
    return raw


@pytest.mark.parametrize(
    ("pod", "kind", "reason"),
    [
        (worker(0, deleting=NOW + 30, conditions=[DRAINED]), "Preempted", "EvictionByEvictionAPI"),
        (worker(0, deleting=NOW + 30, conditions=[TAKEN]), "Preempted", "PreemptionByScheduler"),
        (worker(0, **ended(143), conditions=[TAKEN]), "Preempted", "PreemptionByScheduler"),
        (worker(0, deleting=NOW + 30, conditions=[COLLECTED]), "NodeLost", "DeletionByPodGC"),
        (parse_pod(taken_by_kubelet("Evicted")), "Preempted", "Evicted"),
        (parse_pod(taken_by_kubelet("Terminated")), "Preempted", "Terminated"),
        (parse_pod(taken_by_kubelet("OutOfcpu")), "StartError", "OutOfcpu"),
        (worker(0, **ended(137, "OOMKilled")), "OOMKilled", "OOMKilled"),
        (worker(0, deleting=NOW + 30), None, None),
        (worker(0, **ended(143, said=declared(Outcome.LEFT))), None, None),
    ],
    ids=lambda v: v.name if isinstance(v, Pod) else str(v),
)
def test_what_kubernetes_did_to_a_pod_is_told_in_its_own_words(pod: Pod, kind: str | None, reason: str | None) -> None:
    status_ = told(run(steady(workers=(pod, OTHER), told=report(OTHER))))
    failed = status_.get("lastFailure", {})
    assert (failed.get("class"), failed.get("reason")) == (kind, reason)
    assert status_["restarts"] == int(kind == "OOMKilled")
    assert status_.get("recentFailures", []) == ([failed] if failed else [])


@pytest.mark.parametrize(
    ("name", "lease", "pod", "replaced"),
    [
        ("silent kubelet", NOW - 5, worker(0, 1, avoids="n1", **WAITS), False),
        ("kubelet is back", NOW + 3, worker(0, 1, avoids="n1", **WAITS), True),
        ("nobody looked", None, worker(0, 1, avoids="n1", **WAITS), False),
        ("back, and the pod has a place", NOW + 3, worker(0, 1, avoids="n1", node="n2"), False),
        ("was to start there", NOW - 5, worker(0, 1, phase="Pending", node="n1"), True),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_avoidance_ends_with_the_kubelets_next_word(name: str, lease: float | None, pod: Pod, replaced: bool) -> None:
    p = run(avoiding(lease, pod), NOW + 10)
    creates = [a.name for a in p.actions if isinstance(a, CreateWorker)]
    assert creates == (["bert-0-2"] if replaced else [])


@pytest.mark.parametrize(("age", "replaced"), [(5.0, False), (16.0, True)])
def test_a_pod_that_a_new_store_never_heard_is_lost_when_its_kubelet_is_silent_too(age: float, replaced: bool) -> None:
    observed = replace(steady(told=report(OTHER)), leases={"n1": NOW - age})
    assert [type(a) for a in run(observed).actions] == ([CreateWorker, DeletePod] if replaced else [])


@pytest.mark.parametrize(("age", "forced"), [(20.0, False), (41.0, True)])
@pytest.mark.parametrize("grace_left", [-1, 100])
def test_a_pod_stuck_terminating_is_forced_only_when_its_kubelet_is_gone(
    age: float, forced: bool, grace_left: int
) -> None:
    stuck = worker(0, 0, deleting=NOW + grace_left, node="n9")
    observed = replace(steady(workers=(stuck, worker(0, 1), OTHER), incarnations="1,0"), leases={"n9": NOW - age})
    assert [a.force for a in run(observed).actions if isinstance(a, DeletePod)] == ([True] if forced else [])


# ---- scaling ---------------------------------------------------------------------------------------------------


def test_scale_down_deletes_the_highest_slots_and_tells_the_store_first() -> None:
    pods = (worker(0), worker(1), worker(2))
    observed = replace(
        steady(workers=pods, incarnations="0,0,0", targetReplicas=3),
        job=job(status=status(incarnations="0,0,0", targetReplicas=3), **elastic(1, 4, 2)),
    )
    p = run(observed)
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-2-0"]
    assert p.operator_view is not None
    assert {f.pod: f.state for f in p.operator_view.pods}["bert-2-0"] is PodState.DRAINING
    assert p.operator_view.settings.target == 2
    assert (told(p)["targetReplicas"], told(p)["incarnations"]) == (2, "0,0,0")
    assert "lastScaleTime" in told(p)
    assert "ScalingDown" in [n.reason for n in p.event_records]


def test_scale_up_again_never_reuses_a_name() -> None:
    observed = replace(steady(), job=job(status=status(incarnations="0,0,0"), **elastic(1, 4, 4)))
    p = run(observed)
    assert [a.name for a in p.actions if isinstance(a, CreateWorker)] == ["bert-2-1", "bert-3-0"]
    assert (told(p)["phase"], [c["reason"] for c in told(p)["conditions"]][2]) == ("Scaling", "ScalingUp")


# ---- spares


def spared(*, low: int = 1, replicas: int = 2, spares: int = 1) -> Raw:
    fields = elastic(low, 4, replicas)
    fields["elasticPolicy"]["spares"] = spares
    return fields


def scaled(p: Plan) -> tuple[str, str, str]:
    found = next(c for c in told(p)["conditions"] if c["type"] == "FullyScaled")
    return found["status"], found["reason"], found["message"]


def with_spare(*pods: Pod, active: int = 2, **status_more: Any) -> Observed:
    """Two of the pods train, the others stand by."""
    nodes = report(*pods).nodes
    nodes = tuple(replace(n, member=i < active) for i, n in enumerate(nodes))
    told_by = report(*pods, nodes=nodes, active=active, world_size=active)
    observed = steady(workers=pods, told=told_by)
    return replace(observed, job=job(status=status(**status_more), **spared()))


def test_spares_come_on_top_of_the_target_and_lower_slots_first() -> None:
    p = run(Observed(job(**spared(spares=2))))
    assert [a.index for a in p.actions if isinstance(a, CreateWorker)] == [0, 1, 2, 3]
    assert (told(p)["targetReplicas"], told(p)["incarnations"]) == (2, "0,0,0,0")


def test_a_job_is_fully_scaled_with_its_spares_and_without_them() -> None:
    pods = (worker(0), worker(1), worker(2))
    p = run(with_spare(*pods, incarnations="0,0,0"))
    assert scaled(p) == ("True", "AtDesiredReplicas", "all 2 nodes train; spares that stand by: 1 of 1")
    assert [told(p)[n] for n in ("replicas", "active", "ready", "standby")] == [3, 2, 3, 1]
    assert p.operator_view is not None
    assert (p.operator_view.settings.target, p.operator_view.settings.spares, len(p.operator_view.pods)) == (2, 1, 3)
    scarce = with_spare(worker(0), worker(1), incarnations="0,0,0")
    p = run(replace(scarce, workers=(*scarce.workers, worker(2, **unschedulable()))))
    assert scaled(p) == ("True", "AtDesiredReplicas", "all 2 nodes train; spares that stand by: 0 of 1")
    assert (told(p)["phase"], [n.reason for n in p.event_records if n.warning]) == ("Running", [])


def test_a_lost_pod_whose_place_a_spare_took_has_a_successor_that_is_not_missing() -> None:
    p = run(with_spare(worker(0), worker(2), incarnations="0,0,0"))
    assert p.actions == (CreateWorker("bert-1-1", 1, 1),)
    assert (told(p)["incarnations"], told(p)["restarts"], scaled(p)[0]) == ("0,1,0", 0, "True")


def test_a_spare_counts_where_others_find_no_place() -> None:
    pods = (worker(0), worker(1, **unschedulable()), worker(2))
    observed = replace(with_spare(*pods, incarnations="0,0,0"), link=link(gathering(pods[0], pods[2])))
    waiting = run(replace(observed, job=job(status=status(incarnations="0,0,0"), **spared(low=2))))
    assert {c["type"]: c["reason"] for c in told(waiting)["conditions"]}["Running"] == "WaitingForMinReplicas"


def test_fewer_spares_are_the_highest_slots_less() -> None:
    pods = (worker(0), worker(1), worker(2))
    observed = with_spare(*pods, incarnations="0,0,0")
    p = run(replace(observed, job=job(status=status(incarnations="0,0,0"), **elastic(1, 4, 2))))
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-2-0"]
    assert p.operator_view is not None
    assert {f.pod: f.state for f in p.operator_view.pods}["bert-2-0"] is PodState.DRAINING
    assert scaled(p)[1] == "ScalingDown"


@pytest.mark.parametrize(("asked", "target"), [(None, 4), (1, 2), (9, 4), (3, 3)])
def test_the_target_stays_within_the_policy(asked: int | None, target: int) -> None:
    fields = elastic(2, 4, asked)
    raw = job(**({"replicas": None} | fields))
    assert raw.spec is not None
    assert raw.spec.target == target


# ---- refused children ------------------------------------------------------------------------------------------


def test_a_refused_pod_is_tried_again_under_its_name_when_its_time_has_come() -> None:
    refused = {"bert-0-0": Refusal(RefusalReason.QUOTA_EXCEEDED, "pods bert-0-0 is forbidden: quota", NOW + 5)}
    observed = replace(steady(workers=(OTHER,), told=gathering(OTHER)), refusals=refused)
    early = run(observed)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(5.0)
    assert {c["type"]: c["reason"] for c in told(early)["conditions"]}["Running"] == "QuotaExceeded"
    assert run(observed, NOW + 5).actions == (CreateWorker("bert-0-0", 0, 0),)


def test_a_pod_name_of_somebody_else_is_passed_over() -> None:
    refused = {"bert-0-0": Refusal(RefusalReason.NAME_TAKEN, "taken", NOW)}
    p = run(replace(steady(workers=(OTHER,)), refusals=refused))
    assert p.actions == (CreateWorker("bert-0-1", 0, 1),)


def test_a_service_of_somebody_else_stops_everything_and_is_left_alone() -> None:
    children = Children(None, Child("x", ours=False), None)
    p = run(Observed(job(), children=children))
    assert p.actions == ()
    status_ = told(p)
    assert "incarnations" not in status_ or status_["incarnations"] == ""
    assert {c["type"]: c["reason"] for c in status_["conditions"]}["Running"] == "NameTaken"


def test_a_deleted_job_gets_nothing() -> None:
    gone = replace(job(), deleting=True)
    assert run(Observed(gone)) == Plan()
