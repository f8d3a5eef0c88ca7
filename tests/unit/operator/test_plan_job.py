"""The store, the budget, the end of a job, and what status says: given what is there, what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob.contract.messages import (
    EndReason,
    FailureClass,
    HangAction,
    Outcome,
    PodState,
    RecoverySeconds,
    Report,
    RoundPhase,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.confirmation import CONFIRMATION_SECONDS
from elasticjob_operator.actions import CreateStore, CreateWorker, DeletePod, DeleteService, UpdateStoreService
from elasticjob_operator.model.observed import LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.plan import Plan, plan
from elasticjob_operator.plan.context import (
    LEASE_LATE_SECONDS,
    LOST_GRACE_SECONDS,
    NODES_SWITCH_SECONDS,
    STORE_UNRESPONSIVE_SECONDS,
)
from support.operator_build import (
    CHILDREN,
    IMAGE,
    NOW,
    condition,
    declared,
    elastic,
    ended,
    failure,
    gathering,
    job,
    link,
    report,
    round_ended,
    status,
    steady,
    store,
    unschedulable,
    worker,
)


def run(observed: Observed, now: float = NOW) -> Plan:
    return plan(observed, IMAGE, now)


def told(p: Plan) -> dict[str, Any]:
    assert p.status is not None
    return dict(p.status)


def conditions(p: Plan) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in told(p)["conditions"]}


# ---- the store -------------------------------------------------------------------------------------------------

DOWN = LinkView(connected=False, since=NOW - 12)


def with_store(pod: Pod | None, down: LinkView = DOWN, lease: float | None = None) -> Observed:
    leases = {} if lease is None else {"n1": lease}
    observed = steady(conditions=[condition("RendezvousReady")])
    return replace(observed, stores=() if pod is None else (pod,), link=down, leases=leases)


@pytest.mark.parametrize(
    ("name", "pod", "lease_age", "created", "deleted"),
    [
        ("gone", None, None, True, False),
        ("failed", store(phase="Failed", container={"state": {}}), None, True, True),
        ("being deleted", store(deleting=NOW + 5), None, False, False),
        (
            "container restarts in place",
            store(container={"state": {"terminated": {"exitCode": 1}}}),
            None,
            False,
            False,
        ),
        ("never heard, kubelet speaks", store(), 5.0, False, False),
        ("never heard, like its kubelet", store(), 16.0, True, True),
        ("deleted on a node that is gone", store(deleting=NOW - 9), 41.0, True, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_when_a_store_that_this_operator_never_heard_has_a_successor(
    name: str, pod: Pod | None, lease_age: float | None, created: bool, deleted: bool
) -> None:
    p = run(with_store(pod, lease=None if lease_age is None else NOW - lease_age))
    away = () if lease_age is None else ("n1",)
    made = [CreateStore("bert-rdzv-1", 1, away)] if created else []
    assert [a for a in p.actions if isinstance(a, CreateStore)] == made
    assert [a.force for a in p.actions if isinstance(a, DeletePod)] == [False] * deleted
    points = [a for a in p.actions if isinstance(a, UpdateStoreService)]
    assert points == ([UpdateStoreService("r", 1)] if created else [])
    assert told(p)["rendezvous"]["incarnation"] == int(created)


HEARD = report(worker(0), worker(1))


@pytest.mark.parametrize(
    ("name", "pod", "silent", "heard", "created"),
    [
        ("a blip", store(), STORE_UNRESPONSIVE_SECONDS - 0.1, HEARD, False),
        ("silent", store(), STORE_UNRESPONSIVE_SECONDS, HEARD, True),
        ("another one was heard", store(), STORE_UNRESPONSIVE_SECONDS, replace(HEARD, incarnation=7), False),
        ("its kubelet sees to it", store(conditions=[{"type": "Ready", "status": "False"}]), 60.0, HEARD, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_store_that_falls_silent_has_a_successor_soon(
    name: str, pod: Pod, silent: float, heard: Report, created: bool
) -> None:
    if name.startswith("its"):
        pod = replace(pod, ready=False)
    p = run(with_store(pod, LinkView(False, NOW - silent, heard)))
    assert [a for a in p.actions if isinstance(a, CreateStore)] == [CreateStore("bert-rdzv-1", 1, ("n1",))] * created
    assert [a.force for a in p.actions if isinstance(a, DeletePod)] == [False] * created
    assert (p.store_address is None) is created
    assert p.requeue_after is not None


@pytest.mark.parametrize(("silent", "lease_age", "after"), [(0.5, None, 1.5), (9.0, 4.0, 5.0), (9.0, 12.0, 3.0)])
def test_a_silent_store_is_looked_at_when_it_may_be_given_up(
    silent: float, lease_age: float | None, after: float
) -> None:
    lease = None if lease_age is None else NOW - lease_age
    assert run(with_store(store(), LinkView(False, NOW - silent), lease)).requeue_after == pytest.approx(after)


def test_no_word_goes_to_a_store_that_is_given_up() -> None:
    asks = replace(gathering(worker(0), confirmation_request=12.5), reason="")
    p = run(with_store(store(), LinkView(False, NOW - 3, asks)))
    assert (p.store_address, told(p)["rendezvous"]["incarnation"]) == (None, 1)


@pytest.mark.parametrize(
    ("name", "lease_age", "age", "forced"),
    [
        ("its kubelet will end it", 5.0, 60.0, False),
        ("its kubelet is silent", LEASE_LATE_SECONDS, LEASE_LATE_SECONDS, True),
        ("a word to it may still hold", LEASE_LATE_SECONDS, CONFIRMATION_SECONDS, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_older_store_is_gone_by_force_only_once_its_word_and_its_kubelet_are_out_of_date(
    name: str, lease_age: float, age: float, forced: bool
) -> None:
    observed = with_store(store(deleting=NOW - 1), link(report(incarnation=1)), NOW - lease_age)
    stores = (*observed.stores, store(1, node="n2", created=NOW - age))
    observed = replace(observed, stores=stores, job=job(status=status(rendezvous={"incarnation": 1})))
    deleted = [a for a in run(observed).actions if isinstance(a, DeletePod) and "rdzv" in a.name]
    assert [(a.name, a.force) for a in deleted] == [("bert-rdzv-0", True)] * forced


def test_the_successor_of_a_store_lost_with_its_node_stays_away_from_it() -> None:
    p = run(with_store(store(), LinkView(False, NOW - 3, HEARD)))
    assert [n["name"] for n in told(p)["avoidedNodes"]] == ["n1"]
    waits = with_store(store(1, avoids="n1", **unschedulable()), lease=NOW + 5)
    waits = replace(waits, job=job(status=told(p)))
    assert [a.name for a in run(waits, NOW + 6).actions if isinstance(a, DeletePod)] == ["bert-rdzv-1"]


def test_pods_on_the_node_of_a_lost_store_are_not_waited_for() -> None:
    observed = with_store(store(), LinkView(False, NOW - 3, HEARD))
    p = run(replace(observed, workers=(worker(0), worker(1, node="n2"))))
    assert p.operator_view is not None
    assert [f.state for f in p.operator_view.pods] == [PodState.LOST, PodState.RUNNING]


@pytest.mark.parametrize(
    ("name", "heard", "since", "replaced"),
    [
        ("the others came", report(worker(1), incarnation=1), NOW - LOST_GRACE_SECONDS, True),
        ("they came just now", report(worker(1), incarnation=1), NOW - 1, False),
        ("nobody came", gathering(incarnation=1), NOW - 9, False),
        ("it still recovers", gathering(worker(1), incarnation=1, phase=RoundPhase.RECOVERING), NOW - 9, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_pod_lost_with_the_store_has_a_successor_once_the_others_are_at_the_new_store(
    name: str, heard: Report, since: float, replaced: bool
) -> None:
    avoided = [{"name": "n1", "until": "2027-01-16T08:00:00Z", "why": "silent"}]
    lost = status(rendezvous={"incarnation": 1}, avoidedNodes=avoided)
    observed = steady(workers=(worker(0), worker(1, node="n2")))
    observed = replace(
        observed, job=job(status=lost), stores=(store(1, node="n2"),), link=link(heard, since=since),
        leases={"n1": NOW - 9},
    )  # fmt: skip
    made = [a.name for a in run(observed).actions if isinstance(a, CreateWorker)]
    assert made == ["bert-0-1"] * replaced


def test_a_store_that_was_refused_keeps_its_incarnation() -> None:
    refused = {"bert-rdzv-0": Refusal(RefusalReason.QUOTA_EXCEEDED, "exceeded quota", NOW + 3)}
    observed = replace(with_store(None), refusals=refused)
    assert run(observed).actions == ()
    assert run(observed, NOW + 3).actions == (CreateStore("bert-rdzv-0", 0),)


@pytest.mark.parametrize(
    ("name", "pod", "seen", "expected"),
    [
        ("serves", store(), link(report()), ("True", "StoreAvailable")),
        ("blinked", store(), LinkView(False, NOW - 1), ("True", "R")),
        ("silent", store(), LinkView(False, NOW - 4), ("False", "StoreLost")),
        ("gone", None, DOWN, ("False", "StoreRescheduled")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_rendezvous_ready(name: str, pod: Pod | None, seen: LinkView, expected: tuple[str, str]) -> None:
    assert conditions(run(with_store(pod, seen)))["RendezvousReady"] == expected


def test_status_says_what_is_not_known_while_the_store_cannot_be_asked() -> None:
    trains: dict[str, Any] = {"active": 2, "worldSize": 2, "rendezvousRound": 4, "restarts": 1}
    before = [condition("RendezvousReady"), condition("Running")]
    p = run(replace(steady(conditions=before, **trains), link=LinkView(False, NOW - 60)))
    status_ = told(p)
    assert {name: status_[name] for name in trains} == trains
    (says,) = [c["message"] for c in status_["conditions"] if c["type"] == "RendezvousReady"]
    assert "not been heard of since 2027-01-15T07:59:00Z" in says
    assert "restarted since is not known" in says


# ---- restarts --------------------------------------------------------------------------------------------------


def after(*ended_rounds: Any, **status_more: Any) -> Observed:
    return steady(told=replace(gathering(worker(0), worker(1), rounds=1), ended_rounds=ended_rounds), **status_more)


@pytest.mark.parametrize(
    ("name", "rounds", "seen", "restarts", "charged_round"),
    [
        ("one failure", (round_ended(1),), None, 1, "1.0.1"),
        ("seen before", (round_ended(1),), "1.0.1", 0, "1.0.1"),
        ("two at once", (round_ended(1), round_ended(2)), None, 2, "1.0.2"),
        ("out of order, one seen", (round_ended(3), round_ended(2)), "1.0.2", 1, "1.0.3"),
        ("a lost node is free", (round_ended(1, EndReason.AGENT_LOST),), None, 0, "1.0.1"),
        ("a deletion is free", (round_ended(1, EndReason.NODE_LEFT),), None, 0, "1.0.1"),
        ("scaling is free", (round_ended(1, EndReason.SCALING_UP),), None, 0, "1.0.1"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_each_ended_round_is_charged_once(
    name: str, rounds: Any, seen: str | None, restarts: int, charged_round: str
) -> None:
    p = run(after(*rounds, **({"chargedRound": seen} if seen else {})))
    status_ = told(p)
    assert (status_["restarts"], status_["chargedRound"]) == (restarts, charged_round)
    assert p.operator_view is not None
    assert (p.operator_view.charged, p.operator_view.charged_round) == (restarts, RoundId.parse(charged_round))


TAKEN: dict[str, Any] = {
    "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
}


PAST = (worker(0, deleting=NOW - 60),)


@pytest.mark.parametrize(
    ("name", "kind", "pods", "charged"),
    [
        ("killed as its pod was evicted", FailureClass.KILLED, (worker(0, **TAKEN), worker(1)), False),
        ("killed as its pod was deleted", FailureClass.KILLED, (worker(0, deleting=NOW + 30), worker(1)), False),
        ("killed as another pod was evicted", FailureClass.KILLED, (worker(0), worker(1, **TAKEN)), True),
        ("a peer of its was evicted", FailureClass.COLLECTIVE_FAILED, (worker(0), worker(1, **TAKEN)), False),
        ("nobody was taken away", FailureClass.COLLECTIVE_FAILED, (worker(0), worker(1)), True),
        ("a pod of the past is stuck", FailureClass.COLLECTIVE_FAILED, (*PAST, worker(0, 1), worker(1)), True),
        ("it failed by itself", FailureClass.USER_ERROR, (worker(0, **TAKEN), worker(1)), True),
    ],
    ids=lambda v: v if isinstance(v, str) and " " in v else "",
)
def test_a_charge_is_withdrawn_if_a_pod_fact_excuses_it_before_it_is_persisted(
    name: str, kind: FailureClass, pods: tuple[Pod, ...], charged: bool
) -> None:
    now = f"{pods[-2].incarnation},0"
    p = run(replace(after(round_ended(1, failure=failure(kind=kind)), incarnations=now), workers=pods))
    status_ = told(p)
    assert (status_["restarts"], status_["chargedRound"]) == (int(charged), "1.0.1")
    assert p.operator_view is not None
    assert (p.operator_view.charged, p.operator_view.charged_round) == (int(charged), RoundId(1, 0, 1))


def test_the_root_cause_is_told_in_full() -> None:
    cause = failure(rank=3, message="loss is nan")
    status_ = told(run(after(round_ended(1, failure=cause))))
    assert status_["lastFailure"] == {
        "time": "2027-01-15T07:59:58Z", "pod": "bert-0-0", "node": "n1", "rank": 3, "exitCode": 1,
        "reason": "ValueError", "class": "UserError", "exception": "ValueError",
        "message": "loss is nan",
    }  # fmt: skip
    assert status_["recentFailures"] == [status_["lastFailure"]]


def test_status_keeps_the_last_ten_failures() -> None:
    old = [{"pod": f"p{i}"} for i in range(10)]
    kept = told(run(after(round_ended(1), recentFailures=old)))["recentFailures"]
    assert [f["pod"] for f in kept] == [*(f"p{i}" for i in range(1, 10)), "bert-0-0"]


def test_a_failure_beyond_the_budget_ends_the_job() -> None:
    spent: dict[str, Any] = {"restarts": 3, "restartsCountTowardsMax": 3, "conditions": [condition("Running")]}
    pods = (worker(0, **ended(137, "OOMKilled")), worker(1))
    p = run(steady(workers=pods, **spent))
    status_ = told(p)
    assert conditions(p)["FailureTarget"] == ("True", "MaxRestartsExceeded")
    assert "Failed" not in conditions(p)
    assert (status_["restarts"], status_["phase"]) == (3, "Failed")
    assert status_["lastFailure"]["class"] == FailureClass.OOM_KILLED.value
    assert [n.reason for n in p.event_records] == ["WorkerFailed", "MaxRestartsExceeded"]
    assert status_["incarnations"] == "0,0"


# ---- the end ---------------------------------------------------------------------------------------------------

WON = declared(Outcome.SUCCEEDED)
FINISHED = replace(report(worker(0), worker(1)), phase=RoundPhase.FINISHED, outcome=Outcome.SUCCEEDED)


def test_success_declared_by_the_store_waits_for_the_pods() -> None:
    p = run(steady(told=FINISHED))
    assert p.actions == ()
    assert conditions(p)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")
    assert "Complete" not in conditions(p)
    assert conditions(p)["Running"] == ("False", "Finished")


def test_one_termination_message_proves_success_while_the_store_is_away() -> None:
    pods = (worker(0, **ended(0, "Completed", WON)), worker(1))
    p = run(replace(steady(workers=pods), link=DOWN, stores=()))
    assert conditions(p)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")
    assert p.actions == ()
    assert told(p)["restarts"] == 0


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_pods_are_enough_to_finish_a_job_whose_store_was_never_heard(outcome: Outcome) -> None:
    won = outcome is Outcome.SUCCEEDED
    cause = None if won else failure(rank=1, message="loss is nan")
    end = ended(0 if won else 1, "Completed" if won else "Error", declared(outcome, cause))
    pods = (worker(0, **end), worker(1, **end))
    p = run(replace(steady(workers=pods), link=LinkView(False, NOW - 60), stores=()))
    kind, reason = ("Complete", "AllAgentsSucceeded") if won else ("Failed", "MaxRestartsExceeded")
    assert conditions(p)[kind] == ("True", reason)
    assert told(p).get("lastFailure", {}).get("message") == (None if won else "loss is nan")
    (says,) = [c["message"] for c in told(p)["conditions"] if c["type"] == kind]
    assert "restarts that only the store knew of are not counted" in says
    assert not [a for a in p.actions if isinstance(a, CreateStore)]


def test_a_store_that_does_not_know_of_the_end_is_told() -> None:
    pods = (worker(0, **ended(0, "Completed", WON)), worker(1))
    restarted = gathering(worker(1), phase=RoundPhase.RECOVERING)
    p = run(steady(workers=pods, told=restarted))
    assert p.operator_view is not None
    assert p.operator_view.finish is not None
    assert (p.operator_view.finish.outcome, p.operator_view.finish.reason) == (Outcome.SUCCEEDED, "AllAgentsSucceeded")
    assert p.operator_view.pods == ()
    again = run(steady(workers=(worker(1),), told=restarted, conditions=[MET]))
    assert again.operator_view is not None
    assert again.operator_view.finish is not None
    going_on = run(steady(told=restarted))
    assert going_on.operator_view is not None
    assert going_on.operator_view.finish is None


MET = condition("SuccessCriteriaMet", reason="AllAgentsSucceeded", at=NOW - 5)
DONE = (worker(0, **ended(0, "Completed", WON)), worker(1, **ended(0, "Completed", WON)))


def test_complete_once_all_pods_have_ended_and_then_the_store_goes() -> None:
    p = run(steady(workers=DONE, conditions=[MET]))
    assert conditions(p)["Complete"] == ("True", "AllAgentsSucceeded")
    status_ = told(p)
    assert (status_["phase"], status_["succeeded"], status_["active"], status_["worldSize"]) == ("Succeeded", 2, 0, 0)
    assert status_["completionTime"] == "2027-01-15T08:00:00Z"
    assert p.actions == (
        DeletePod("bert-rdzv-0", "uid-bert-rdzv-0", "the job has ended"),
        DeleteService("bert", "n"),
        DeleteService("bert-rdzv", "r"),
    )


def test_what_does_not_end_by_itself_is_deleted() -> None:
    observed = steady(workers=(DONE[0], worker(1)), conditions=[MET])
    early = run(observed)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(5.0)
    assert [a.name for a in run(observed, NOW + 6).actions if isinstance(a, DeletePod)] == ["bert-1-0"]


def test_a_pod_that_the_kubelet_has_not_called_running_may_have_done_its_part() -> None:
    observed = steady(workers=(DONE[0], worker(1, phase="Pending", node="n1")), conditions=[MET])
    assert run(observed).actions == ()
    homeless = steady(workers=(DONE[0], worker(1, phase="Pending", node="")), conditions=[MET])
    assert [a.name for a in run(homeless).actions if isinstance(a, DeletePod)] == ["bert-1-0"]


def test_a_pod_stuck_on_a_dead_node_does_not_hold_the_end() -> None:
    observed = steady(workers=(DONE[0], worker(1, deleting=NOW - 40)), conditions=[MET])
    assert "Complete" in conditions(run(observed))
    silent = steady(workers=(DONE[0], worker(1, deleting=NOW + 100, node="n9")), conditions=[MET])
    for age, ends in ((20.0, False), (41.0, True)):
        assert ("Complete" in conditions(run(replace(silent, leases={"n9": NOW - age})))) is ends


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_terminal_is_final_whoever_deletes_what(kind: str) -> None:
    first = condition("SuccessCriteriaMet" if kind == "Complete" else "FailureTarget", reason="X")
    observed = replace(steady(workers=(), conditions=[first, condition(kind, reason="X")]), stores=(), link=LinkView())
    children = replace(CHILDREN, nodes=None, rendezvous=None)
    p = run(replace(observed, children=children))
    assert p.actions == ()
    assert conditions(p)[kind] == ("True", "X")
    again = run(replace(observed, children=children, job=job(status=told(p))))
    assert (again.status, again.actions) == (None, ())


def test_a_failed_job_names_its_cause_and_what_to_do() -> None:
    lost_budget = replace(
        report(worker(0), worker(1)), phase=RoundPhase.FINISHED, outcome=Outcome.FAILED, failure=failure(rank=1),
        ended_rounds=(replace(round_ended(4), charged=False),),
    )  # fmt: skip
    p = run(steady(told=lost_budget, restarts=3, restartsCountTowardsMax=3))
    (target,) = [c for c in told(p)["conditions"] if c["type"] == "FailureTarget"]
    assert target["reason"] == "MaxRestartsExceeded"
    for words in ("3 of 3 restarts", "rank 1", "ValueError", "bad", "maxRestarts"):
        assert words in target["message"]
    assert told(p)["lastFailure"]["rank"] == 1


def test_a_spec_that_cannot_run_fails_with_a_sentence() -> None:
    p = run(Observed(job(template={"spec": {"containers": [{"name": "a", "image": "b"}]}})))
    (failed,) = told(p)["conditions"]
    assert (failed["type"], failed["reason"]) == ("Failed", "InvalidSpec")
    assert "command" in failed["message"]


# ---- conditions ------------------------------------------------------------------------------------------------

NO_IMAGE: dict[str, Any] = {
    "phase": "Pending",
    "container": {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}},
}
NO_CONFIG: dict[str, Any] = {
    "phase": "Pending",
    "container": {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'configmap "x" not found'}}},
}
TWO = (worker(0), worker(1))


@pytest.mark.parametrize(
    ("name", "pods", "seen", "more", "running", "scaled", "phase"),
    [
        ("trains", TWO, report(*TWO), {}, "WorldFormed", "AtDesiredReplicas", "Running"),
        ("starts", TWO, gathering(*TWO), {}, "WaitingForMinReplicas", "ScalingUp", "Starting"),
        (
            "no room", (worker(0), worker(1, **unschedulable())), gathering(worker(0)), {}, "Unschedulable",
            "InsufficientCapacity", "Pending",
        ),
        (
            "no image", (worker(0), worker(1, **NO_IMAGE)), gathering(worker(0)), {}, "ImagePullFailed",
            "BelowDesiredAboveMin", "Pending",
        ),
        (
            "no config", (worker(0), worker(1, **NO_CONFIG)), gathering(worker(0)), {}, "PodCreationFailed",
            "BelowDesiredAboveMin", "Pending",
        ),
        (
            "between rounds", TWO, gathering(*TWO, rounds=1), {"rendezvousRound": 1}, "Restarting",
            "BelowDesiredAboveMin", "Scaling",
        ),
        (
            "a store that recovers", TWO, replace(gathering(*TWO), phase=RoundPhase.RECOVERING),
            {"conditions": [condition("Running")], "active": 2, "worldSize": 2}, "WorldFormed", "AtDesiredReplicas",
            "Running",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) and " " in v else "",
)  # fmt: skip
def test_running_and_fully_scaled(
    name: str, pods: tuple[Pod, ...], seen: Report, more: dict[str, Any], running: str, scaled: str, phase: str
) -> None:
    p = run(steady(workers=pods, told=seen, **more))
    assert (conditions(p)["Running"][1], conditions(p)["FullyScaled"][1], told(p)["phase"]) == (running, scaled, phase)


def test_only_the_present_store_is_told_that_it_is_the_only_one() -> None:
    assert word(steady(told=report(*TWO, confirmation_request=12.5))) == 12.5
    assert word(steady(told=report(*TWO, confirmation_request=12.5, incarnation=1))) == 0.0


R1, R2 = RoundId(1, 0, 1), RoundId(1, 0, 2)
ASKS = gathering(worker(0), incarnation=1, confirmation_request=12.5)
HALF = replace(ASKS, half_missing_round=R1)


@pytest.mark.parametrize(
    ("name", "asks", "before", "older_at", "given"),
    [
        ("the old one has ended, its nodes have come", ASKS, None, NOW - NODES_SWITCH_SECONDS, True),
        ("they may be on their way", ASKS, None, NOW - NODES_SWITCH_SECONDS + 0.1, False),
        ("more than half is missing", ASKS, HEARD, NOW, False),
        ("half is here of the round that the old one had", HALF, HEARD, NOW, True),
        ("the old one was not heard", HALF, None, NOW, False),
        ("the old one had a newer round", HALF, replace(HEARD, round=R2), NOW, False),
        ("the old one may have had a word", HALF, replace(HEARD, round=None, confirmation_request=11.0), NOW, False),
        ("it was not the one before", replace(HALF, incarnation=2), HEARD, NOW, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_successor_is_told_so_once_no_older_store_can_have_a_world(
    name: str, asks: Report, before: Report | None, older_at: float, given: bool
) -> None:
    present = job(status=status(rendezvous={"incarnation": asks.incarnation}))
    observed = replace(steady(), job=present, link=replace(link(asks), previous_report=before), older_store_at=older_at)
    assert word(observed) == (12.5 if given else 0.0)
    assert run(observed).requeue_after is not None or given


def word(observed: Observed) -> float:
    p = run(observed)
    assert p.operator_view is not None
    return p.operator_view.confirmed_request


def test_more_replicas_than_fit_train_with_what_there_is() -> None:
    pods = (*TWO, worker(2, **unschedulable("0/3 nodes are available: 3 Insufficient cpu.")))
    observed = replace(
        steady(workers=pods, told=report(*TWO)),
        job=job(status=status(incarnations="0,0,0", targetReplicas=3), **elastic(2, 4, 3)),
    )
    p = run(observed)
    assert conditions(p)["Running"] == ("True", "WorldFormed")
    assert conditions(p)["FullyScaled"] == ("False", "InsufficientCapacity")
    (scaled,) = [c for c in told(p)["conditions"] if c["type"] == "FullyScaled"]
    assert "3 Insufficient cpu" in scaled["message"]
    assert told(p)["phase"] == "Degraded"
    assert p.operator_view is not None
    assert [f.state.value for f in p.operator_view.pods] == ["running", "running", "unschedulable"]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (EndReason.WORKER_FAILED, ("True", "WorkerFailed")),
        (EndReason.AGENT_LOST, ("True", "AgentLost")),
        (EndReason.NODE_LEFT, ("True", "PodEvicted")),
        (EndReason.SCALING_UP, None),
    ],
)
def test_restarting_is_told_for_faults_only(reason: EndReason, expected: tuple[str, str] | None) -> None:
    p = run(after(round_ended(1, reason), rendezvousRound=1))
    assert conditions(p).get("Restarting") == expected


def test_restarting_ends_with_the_next_world() -> None:
    before = [condition("Restarting", reason="WorkerFailed")]
    p = run(steady(conditions=before, restarts=1, rendezvousRound=1, lastRendezvousTime="2027-01-15T07:58:00.000000Z"))
    assert conditions(p)["Restarting"] == ("False", "WorldFormed")
    assert told(p)["rendezvousRound"] == 2
    assert [n.reason for n in p.event_records] == ["WorldFormed", "RestartedInPlace"]


@pytest.mark.parametrize(
    ("name", "rounds", "counted", "seen", "becomes"),
    [
        ("first", 0, "", 1, 1),
        ("missed some", 1, "2027-01-15T07:58:00.000000Z", 4, 4),
        ("a new store counts from 1", 7, "2027-01-15T07:58:00.000000Z", 1, 8),
        ("no news", 7, "2027-01-15T07:59:30.000000Z", 1, 7),
    ],
)
def test_rounds_are_counted_upwards_across_stores(
    name: str, rounds: int, counted: str, seen: int, becomes: int
) -> None:
    p = run(steady(told=report(*TWO, rounds=seen), rendezvousRound=rounds, lastRendezvousTime=counted))
    assert told(p)["rendezvousRound"] == becomes


def test_a_round_that_a_new_store_restored_is_not_counted_again() -> None:
    restored = report(*TWO, incarnation=1, round=RoundId(1, 0, 1), formed_at=NOW - 3)
    observed = steady(
        told=restored,
        rendezvousRound=4,
        rendezvous={"endpoint": "", "incarnation": 1},
        conditions=[condition("Running")],
    )
    p = run(replace(observed, stores=(store(1),)))
    assert told(p)["rendezvousRound"] == 4
    assert p.event_records == ()


def test_status_of_a_newer_operator_is_kept() -> None:
    p = run(steady(goodput={"percent": 99}, conditions=[{"type": "Novel", "status": "True"}]))
    assert told(p)["goodput"] == {"percent": 99}
    assert {"type": "Novel", "status": "True"} in told(p)["conditions"]


def test_a_hang_is_told_as_what_it_is() -> None:
    hung = failure(kind=FailureClass.HANG, exit_code=None, exception="", message="no progress for 60.0 s", step=6)
    ended = round_ended(1, failure=hung, message="rank 0 in bert-0-0: no progress for 60.0 s")
    observed = steady(told=gathering(worker(0), worker(1), rounds=1, ended_rounds=(ended,)), rendezvousRound=1)
    p = run(observed)
    status_ = told(p)
    assert (status_["lastFailure"]["class"], status_["lastFailure"]["reason"]) == ("Hang", "HangDetected")
    assert {c["type"]: c["reason"] for c in status_["conditions"]}["Restarting"] == "HangDetected"
    assert [n.reason for n in p.event_records if n.warning] == ["HangDetected"]
    fatal = replace(observed, job=job(status=status(rendezvousRound=1), hangPolicy=POLICY))
    told_by = replace(fatal.link.report or report(), outcome=Outcome.FAILED, failure=hung, ended_rounds=())
    verdict = run(replace(fatal, link=link(told_by)))
    failed = next(c for c in told(verdict)["conditions"] if c["type"] == "FailureTarget")
    assert (failed["reason"], "training stood still" in failed["message"]) == ("FailurePolicyRule", True)


POLICY = {"progressTimeoutSeconds": 60, "action": "FailJob"}


def test_a_hang_that_ends_nothing_is_told_once_and_not_charged() -> None:
    hung = failure(kind=FailureClass.HANG, exit_code=None, exception="", message="no progress for 60.0 s", step=6)
    observed = replace(
        steady(told=replace(report(worker(0), worker(1)), stall=hung)),
        job=job(status=status(), hangPolicy={"progressTimeoutSeconds": 60, "action": "Event"}),
    )
    p = run(observed)
    status_ = told(p)
    assert p.operator_view is not None
    assert p.operator_view.settings.hang_action is HangAction.EVENT
    assert (status_["lastFailure"]["class"], status_["lastFailure"]["pod"]) == ("Hang", "bert-0-0")
    assert (status_["restarts"], status_["restartsCountTowardsMax"], p.actions) == (0, 0, ())
    assert (status_["phase"], "Restarting" in {c["type"] for c in status_["conditions"]}) == ("Running", False)
    assert [n.reason for n in p.event_records if n.warning] == ["HangDetected"]
    # Another failure was told since; and what is known of this one has grown.
    known = {**status_, "recentFailures": [{**status_["lastFailure"], "recoverySeconds": {}}, {"pod": "bert-1-0"}]}
    again = run(replace(observed, job=job(status={**known, "lastFailure": {"pod": "bert-1-0"}})))
    assert (again.event_records, again.status) == ((), None)
    later = replace(report(worker(0), worker(1)), stall=replace(hung, time=hung.time + 61))
    assert [n.reason for n in run(replace(observed, job=job(status=known), link=link(later))).event_records] == [
        "HangDetected"
    ]


def test_why_there_is_no_warm_fork_is_told_once_a_reason() -> None:
    off = replace(report(worker(0), worker(1)), fork_disabled_reason="a forked process hung: so", fork_disabled_nodes=1)
    first = run(steady(told=off))
    assert told(first)["warmFork"] == "off on 1 of 2 nodes: a forked process hung: so"
    (note,) = [n for n in first.event_records if n.warning]
    assert (note.reason, note.key) == ("WarmForkOff", "a forked process hung: so")
    known = told(first)
    for_all = run(replace(steady(told=replace(off, fork_disabled_nodes=2)), job=job(status=known)))
    assert told(for_all)["warmFork"].startswith("off on 2 of 2 nodes: ")
    assert [n.reason for n in for_all.event_records if n.warning] == []
    silent = replace(steady(), job=job(status=known), link=LinkView(since=NOW))
    assert "warmFork" in (run(silent).status or known)
    assert "warmFork" not in told(run(replace(steady(), job=job(status=known))))


def test_how_long_a_recovery_took_is_told_beside_its_failure_once() -> None:
    recovery = RecoverySeconds(("bert-0-0",), detect=0.0012345, stop=0.02, rendezvous=0.001, start=0.06)
    before = {"time": "2027-01-15T07:59:00Z", "pod": "bert-1-0", "class": "Killed"}
    failed = before | {"pod": "bert-0-0"}
    observed = steady(
        told=report(worker(0), worker(1), recovery=recovery), recentFailures=[before, failed], lastFailure=failed
    )
    status_ = told(run(observed))
    phases = {"detect": 0.001, "stop": 0.02, "rendezvous": 0.001, "start": 0.06}
    assert status_["recentFailures"] == [before, failed | {"recoverySeconds": phases}]
    assert status_["lastFailure"] == failed
    later = replace(
        observed,
        job=job(status=status_),
        link=link(replace(observed.link.report or report(), recovery=replace(recovery, stop=9.0))),
    )
    assert run(later).status is None
