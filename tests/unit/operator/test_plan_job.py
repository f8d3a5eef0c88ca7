"""Plans for the store, the restart budget and the end of a job, and the conditions in status."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.failures.failure_text import describe_out_of_memory, describe_worker_failure
from elasticjob._runtime.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    HangAction,
    Outcome,
    PodState,
    RecoverySeconds,
    Report,
    RestartStrategy,
    RoundPhase,
    SuccessPolicy,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.rounds.starts.confirmation import CONFIRMATION_SECONDS
from elasticjob_operator.actions import CreateStore, CreateWorker, DeletePod, DeleteService, UpdateStoreService
from elasticjob_operator.links.store_links import CONNECT_TIMEOUT, LONGEST_BACKOFF, MAX_JITTER
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.plan import plan
from elasticjob_operator.plan.context import (
    AGENTS_SWITCH_SECONDS,
    LAST_REPORT_SECONDS,
    LEASE_LATE_SECONDS,
    LOST_GRACE_SECONDS,
    STORE_GRACE_SECONDS,
    STORE_UNRESPONSIVE_SECONDS,
)
from elasticjob_operator.plan.store_pods.stores import LEASE_POLL_SECONDS
from support.operator.build import (
    CHILDREN,
    IMAGE,
    NOW,
    condition,
    conditions_of,
    declared,
    elastic,
    ended,
    events_of,
    failure,
    gathering,
    job,
    link,
    reasons_of,
    report,
    round_ended,
    run,
    status,
    status_of,
    steady,
    store,
    unschedulable,
    without_standby,
    worker,
)

# ---- the store -------------------------------------------------------------------------------------------------

DOWN = LinkView(connected=False, since=NOW - 12)


def with_store(pod: Pod | None, link_view: LinkView = DOWN, lease: float | None = None) -> Observed:
    """Return a job with this store pod, this link, and this time of the last lease renewal of node n1."""
    leases = {} if lease is None else {"n1": lease}
    observed = without_standby(steady(conditions=[condition("RendezvousReady")]))
    return replace(observed, stores=() if pod is None else (pod,), link=link_view, leases=leases)


@pytest.mark.parametrize(
    ("name", "pod", "lease_age", "created", "deleted"),
    [
        ("missing", None, None, True, False),
        ("failed", store(phase="Failed", container={"state": {}}), None, True, True),
        ("being deleted", store(deleting=NOW + 5), None, False, False),
        (
            "container restarts in place",
            store(container={"state": {"terminated": {"exitCode": 1}}}),
            None,
            False,
            False,
        ),
        ("never reported, its lease is renewed", store(), 5.0, False, False),
        ("never reported, its lease is late", store(), 16.0, True, True),
        ("being deleted on a lost node", store(deleting=NOW - 9), 41.0, True, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_when_a_store_that_never_reported_to_this_operator_is_replaced(
    name: str, pod: Pod | None, lease_age: float | None, created: bool, deleted: bool
) -> None:
    p = run(with_store(pod, lease=None if lease_age is None else NOW - lease_age))
    avoid = () if lease_age is None else ("n1",)
    stores = [CreateStore("bert-rdzv-1", 1, avoid)] if created else []
    assert [a for a in p.actions if isinstance(a, CreateStore)] == stores
    assert [a.force for a in p.actions if isinstance(a, DeletePod)] == [False] * deleted
    updates = [a for a in p.actions if isinstance(a, UpdateStoreService)]
    assert updates == ([UpdateStoreService("r", 1)] if created else [])
    assert status_of(p)["rendezvous"]["incarnation"] == int(created)


LAST_REPORT = report(worker(0), worker(1))


def test_the_link_to_a_store_that_is_being_deleted_stays_while_it_serves() -> None:
    deleting, ended = store(deleting=NOW + 5), store(deleting=NOW + 5, phase="Succeeded", container={"state": {}})
    up = LinkView(True, NOW - 60, LAST_REPORT)
    assert run(with_store(deleting, up)).store_address is not None
    assert run(with_store(ended, up)).store_address is None


@pytest.mark.parametrize(
    ("name", "pod", "silence", "last_report", "created"),
    [
        ("a short interruption", store(), STORE_UNRESPONSIVE_SECONDS - 0.1, LAST_REPORT, False),
        ("unresponsive", store(), STORE_UNRESPONSIVE_SECONDS, LAST_REPORT, True),
        (
            "only another store has reported",
            store(),
            STORE_UNRESPONSIVE_SECONDS,
            replace(LAST_REPORT, incarnation=7),
            False,
        ),
        ("the kubelet reports not ready", replace(store(), ready=False), 60.0, LAST_REPORT, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_unresponsive_store_is_replaced_within_seconds(
    name: str, pod: Pod, silence: float, last_report: Report, created: bool
) -> None:
    p = run(with_store(pod, LinkView(False, NOW - silence, last_report)))
    assert [a for a in p.actions if isinstance(a, CreateStore)] == [CreateStore("bert-rdzv-1", 1, ("n1",))] * created
    assert [a.force for a in p.actions if isinstance(a, DeletePod)] == [False] * created
    assert (p.store_address is None) is created
    assert p.requeue_after is not None


@pytest.mark.parametrize(("left", "deleted"), [(100, True), (STORE_GRACE_SECONDS, False)])
def test_a_drained_store_that_does_not_respond_is_replaced_and_ends_soon(left: float, deleted: bool) -> None:
    drained = store(deleting=NOW + left)
    p = run(with_store(drained, LinkView(False, NOW - STORE_UNRESPONSIVE_SECONDS, LAST_REPORT)))
    assert [a.name for a in p.actions if isinstance(a, CreateStore)] == ["bert-rdzv-1"]
    assert [a.grace for a in p.actions if isinstance(a, DeletePod)] == [STORE_GRACE_SECONDS] * deleted


@pytest.mark.parametrize(("silence", "lease_age", "after"), [(0.5, None, 1.5), (9.0, 4.0, 5.0), (9.0, 12.0, 3.0)])
def test_the_job_is_requeued_for_when_an_unresponsive_store_may_be_replaced(
    silence: float, lease_age: float | None, after: float
) -> None:
    lease = None if lease_age is None else NOW - lease_age
    assert run(with_store(store(), LinkView(False, NOW - silence), lease)).requeue_after == pytest.approx(after)


def test_a_replaced_store_gets_no_confirmation() -> None:
    requesting = gathering(worker(0), confirmation_request=12.5)
    p = run(with_store(store(), LinkView(False, NOW - 3, requesting)))
    assert (p.store_address, status_of(p)["rendezvous"]["incarnation"]) == (None, 1)


@pytest.mark.parametrize(
    ("name", "lease_age", "age", "forced"),
    [
        ("its lease is renewed", 5.0, 60.0, False),
        ("its lease is late", LEASE_LATE_SECONDS, LEASE_LATE_SECONDS, True),
        ("its confirmation may still be valid", LEASE_LATE_SECONDS, CONFIRMATION_SECONDS, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_older_store_is_force_deleted_only_after_its_confirmation_and_lease_expired(
    name: str, lease_age: float, age: float, forced: bool
) -> None:
    observed = with_store(store(deleting=NOW - 1), link(report(incarnation=1)), NOW - lease_age)
    stores = (*observed.stores, store(1, node="n2", created=NOW - age))
    observed = replace(observed, stores=stores, job=job(status=status(rendezvous={"incarnation": 1})))
    deleted = [a for a in run(observed).actions if isinstance(a, DeletePod) and "rdzv" in a.name]
    assert [(a.name, a.force) for a in deleted] == [("bert-rdzv-0", True)] * forced


def test_the_successor_of_a_store_lost_with_its_node_avoids_that_node() -> None:
    p = run(with_store(store(), LinkView(False, NOW - 3, LAST_REPORT)))
    assert [n["name"] for n in status_of(p)["avoidedNodes"]] == ["n1"]
    pending = with_store(store(1, avoids="n1", **unschedulable()), lease=NOW + 5)
    pending = replace(pending, job=job(status=status_of(p)), returned_nodes=frozenset({"n1"}))
    assert [a.name for a in run(pending, NOW + 6).actions if isinstance(a, DeletePod)] == ["bert-rdzv-1"]


def test_pods_on_the_node_of_a_lost_store_are_reported_as_lost() -> None:
    observed = with_store(store(), LinkView(False, NOW - 3, LAST_REPORT))
    p = run(replace(observed, workers=(worker(0), worker(1, node="n2"))))
    assert p.operator_view is not None
    assert [pod.state for pod in p.operator_view.pods] == [PodState.LOST, PodState.RUNNING]


@pytest.mark.parametrize(
    ("name", "last_report", "since", "replaced"),
    [
        ("the others reconnected", report(worker(1), incarnation=1), NOW - LOST_GRACE_SECONDS, True),
        ("they reconnected just now", report(worker(1), incarnation=1), NOW - 1, False),
        ("no node is connected", gathering(incarnation=1), NOW - 9, False),
        ("the store still recovers", gathering(worker(1), incarnation=1, phase=RoundPhase.RECOVERING), NOW - 9, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_pod_lost_with_the_store_is_replaced_once_the_others_reach_the_new_store(
    name: str, last_report: Report, since: float, replaced: bool
) -> None:
    avoided = [{"name": "n1", "until": "2027-01-16T08:00:00Z", "why": "lost"}]
    lost = status(rendezvous={"incarnation": 1}, avoidedNodes=avoided)
    observed = steady(workers=(worker(0), worker(1, node="n2")))
    observed = replace(
        observed, job=job(status=lost), stores=(store(1, node="n2"),), link=link(last_report, since=since),
        leases={"n1": NOW - 9},
    )  # fmt: skip
    created = [a.name for a in run(observed).actions if isinstance(a, CreateWorker)]
    assert created == ["bert-0-1"] * replaced


def test_a_store_pod_that_the_api_server_refused_keeps_its_incarnation() -> None:
    refused = {"bert-rdzv-0": Refusal(RefusalReason.QUOTA_EXCEEDED, "exceeded quota", NOW + 3, NOW)}
    observed = replace(with_store(None), refusals=refused)
    assert run(observed).actions == ()
    assert run(observed, NOW + 3).actions == (CreateStore("bert-rdzv-0", 0),)


@pytest.mark.parametrize(
    ("name", "pod", "link_view", "expected"),
    [
        ("serves", store(), link(report()), ("True", "StoreAvailable")),
        ("short interruption", store(), LinkView(False, NOW - 1), ("True", "StoreAvailable")),
        ("unresponsive", store(), LinkView(False, NOW - 4), ("False", "StoreLost")),
        ("missing", None, DOWN, ("False", "StoreRescheduled")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_rendezvous_ready(name: str, pod: Pod | None, link_view: LinkView, expected: tuple[str, str]) -> None:
    assert reasons_of(run(with_store(pod, link_view)))["RendezvousReady"] == expected


def test_status_says_what_is_unknown_while_the_store_is_unavailable() -> None:
    counts: dict[str, Any] = {"active": 2, "worldSize": 2, "rendezvousRound": 4, "restarts": 1}
    before = [condition("RendezvousReady"), condition("Running")]
    p = run(replace(steady(conditions=before, **counts), link=LinkView(False, NOW - 60)))
    status_ = status_of(p)
    assert {name: status_[name] for name in counts} == counts
    message = conditions_of(p)["RendezvousReady"]["message"]
    assert "has not responded since 2027-01-15T07:59:00Z" in message
    assert "failures and restarts since then are unknown" in message


# ---- restarts --------------------------------------------------------------------------------------------------


def after(*ended_rounds: Any, **fields: Any) -> Observed:
    """Return a job whose store reports these ended rounds; `fields` are added to its status."""
    return steady(last_report=replace(gathering(worker(0), worker(1), rounds=1), ended_rounds=ended_rounds), **fields)


@pytest.mark.parametrize(
    ("name", "rounds", "charged_before", "restarts", "charged_round"),
    [
        ("one failure", (round_ended(1),), None, 1, "1.0.1"),
        ("charged before", (round_ended(1),), "1.0.1", 0, "1.0.1"),
        ("two at once", (round_ended(1), round_ended(2)), None, 2, "1.0.2"),
        ("out of order, one charged before", (round_ended(3), round_ended(2)), "1.0.2", 1, "1.0.3"),
        ("a lost node is not charged", (round_ended(1, EndReason.AGENT_LOST),), None, 0, "1.0.1"),
        ("a deletion is not charged", (round_ended(1, EndReason.NODE_LEFT),), None, 0, "1.0.1"),
        ("scaling is not charged", (round_ended(1, EndReason.SCALING_UP),), None, 0, "1.0.1"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_each_ended_round_is_charged_once(
    name: str, rounds: Any, charged_before: str | None, restarts: int, charged_round: str
) -> None:
    p = run(after(*rounds, **({"chargedRound": charged_before} if charged_before else {})))
    status_ = status_of(p)
    assert (status_["restarts"], status_["chargedRound"]) == (restarts, charged_round)
    assert p.operator_view is not None
    assert (p.operator_view.charged, p.operator_view.charged_round) == (restarts, RoundId.parse(charged_round))


EVICTED: dict[str, Any] = {
    "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
}

STUCK = worker(0, deleting=NOW - 60)


@pytest.mark.parametrize(
    ("name", "kind", "pods", "charged"),
    [
        ("killed as its pod was evicted", FailureClass.KILLED, (worker(0, **EVICTED), worker(1)), False),
        ("killed as its pod was deleted", FailureClass.KILLED, (worker(0, deleting=NOW + 30), worker(1)), False),
        ("killed as another pod was evicted", FailureClass.KILLED, (worker(0), worker(1, **EVICTED)), True),
        ("a peer was evicted", FailureClass.COLLECTIVE_FAILED, (worker(0), worker(1, **EVICTED)), False),
        ("no pod was evicted or deleted", FailureClass.COLLECTIVE_FAILED, (worker(0), worker(1)), True),
        ("an older pod is stuck", FailureClass.COLLECTIVE_FAILED, (STUCK, worker(0, 1), worker(1)), True),
        ("it failed by itself", FailureClass.USER_ERROR, (worker(0, **EVICTED), worker(1)), True),
    ],
    ids=lambda v: v if isinstance(v, str) and " " in v else "",
)
def test_a_charge_is_withdrawn_if_the_state_of_a_pod_excuses_it_before_it_is_persisted(
    name: str, kind: FailureClass, pods: tuple[Pod, ...], charged: bool
) -> None:
    incarnations = f"{pods[-2].incarnation},0"
    p = run(replace(after(round_ended(1, failure=failure(kind=kind)), incarnations=incarnations), workers=pods))
    status_ = status_of(p)
    assert (status_["restarts"], status_["chargedRound"]) == (int(charged), "1.0.1")
    assert p.operator_view is not None
    assert (p.operator_view.charged, p.operator_view.charged_round) == (int(charged), RoundId(1, 0, 1))


def test_ranks_that_never_form_a_group_are_an_event_and_in_the_conditions() -> None:
    text = "wait timeout after 60000ms, keys: /default_pg/0//cuda//0"
    cause = failure(kind=FailureClass.COLLECTIVE_FAILED, exception="DistStoreError", message=text)
    ended_round = round_ended(1, failure=cause, message=describe_worker_failure(cause))
    p = run(after(ended_round, rendezvousRound=1))
    (event,) = [e.message for e in p.event_records if e.reason == "WorkerFailed"]
    for message in (event, conditions_of(p)["Restarting"]["message"]):
        assert f"failed: DistStoreError: {text}; not all ranks met in time" in message


def test_last_failure_holds_the_root_cause_in_full() -> None:
    cause = failure(rank=3, message="loss is nan")
    status_ = status_of(run(after(round_ended(1, failure=cause))))
    assert status_["lastFailure"] == {
        "time": "2027-01-15T07:59:58Z", "pod": "bert-0-0", "node": "n1", "rank": 3, "exitCode": 1,
        "reason": "ValueError", "class": "UserError", "exception": "ValueError",
        "message": "loss is nan",
    }  # fmt: skip
    assert status_["recentFailures"] == [status_["lastFailure"]]


NO_EXCEPTION: dict[str, Any] = {"exception": "", "message": "12:00 epoch 1\n12:01 epoch 2"}


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (failure(message="loss is nan\n  in train()\n"), "rank 0 in bert-0-0 on n1 failed: ValueError: loss is nan"),
        (failure(message=""), "rank 0 in bert-0-0 on n1 failed: ValueError"),
        (failure(exit_code=3, **NO_EXCEPTION), "rank 0 in bert-0-0 on n1 failed: exit code 3: 12:01 epoch 2"),
        (failure(exit_code=None, signal="SIGSEGV", **NO_EXCEPTION), "rank 0 in bert-0-0 on n1 failed: SIGSEGV"),
        (
            failure(kind=FailureClass.HANG, exit_code=None, exception="", message="no progress for 60.0 s\nstack"),
            "rank 0 in bert-0-0 on n1 failed: HangDetected: no progress for 60.0 s",
        ),
        (
            failure(kind=FailureClass.START_ERROR, exit_code=None, exception="", message="no such file: train.py"),
            "rank 0 in bert-0-0 on n1 failed: StartError: no such file: train.py",
        ),
    ],
    ids=["exception", "exception without message", "exit code", "signal", "hang", "start error"],
)
def test_the_event_of_a_failed_worker_is_one_line_and_last_failure_keeps_the_whole_message(
    cause: Failure, message: str
) -> None:
    p = run(after(round_ended(1, failure=cause)))
    assert [e.message for e in p.event_records if e.warning] == [message]
    assert status_of(p)["lastFailure"].get("message", "") == cause.message


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (ended(137, "OOMKilled"), f"bert-0-0 on n1 failed: {describe_out_of_memory(unlimited=True)}"),
        (ended(70), "bert-0-0 on n1 failed: exit code 70"),
        (
            ended(64, termination="ELASTICJOB_INDEX is not set\nusage"),
            "bert-0-0 on n1 failed: exit code 64: ELASTICJOB_INDEX is not set",
        ),
    ],
    ids=["out of memory", "exit code", "termination message"],
)
def test_the_event_of_a_failed_pod_is_one_line(end: Any, message: str) -> None:
    p = run(steady(workers=(worker(0, **end), worker(1))))
    assert [e.message for e in p.event_records if e.reason == "WorkerFailed"] == [message]


def test_status_keeps_the_last_ten_failures() -> None:
    old = [{"pod": f"p{i}"} for i in range(10)]
    kept = status_of(run(after(round_ended(1), recentFailures=old)))["recentFailures"]
    assert [record["pod"] for record in kept] == [*(f"p{i}" for i in range(1, 10)), "bert-0-0"]


def test_the_first_status_of_a_job() -> None:
    p = run(Observed(job=job(generation=7)))
    written = status_of(p)
    assert {name: value for name, value in written.items() if name != "conditions"} == {
        "observedGeneration": 7, "phase": "Pending", "targetReplicas": 2, "incarnations": "0,0", "runtimeImage": IMAGE,
        "incarnationRanges": [{"first": 0, "last": 1, "incarnation": 0}],
        "guardedFields": {"execution": 1, "digest": job().guarded_digest},
        "selector": "elasticjob.dev/job-name=bert,elasticjob.dev/role=worker", "startTime": timestamp(NOW),
        "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0},
        "executionAttempts": 1, "rendezvousRound": 0, "restarts": 0, "restartsCountTowardsMax": 0, "worldSize": 0,
        **dict.fromkeys(("replicas", "active", "ready", "standby", "succeeded", "failed", "terminating"), 0),
    }  # fmt: skip
    assert reasons_of(p) == {
        "RendezvousReady": ("False", "StoreStarting"), "Running": ("False", "WaitingForMinReplicas"),
        "FullyScaled": ("False", "ScalingUp"),
    }  # fmt: skip
    assert {c["observedGeneration"] for c in written["conditions"]} == {7}
    assert {c["lastTransitionTime"] for c in written["conditions"]} == {timestamp(NOW)}
    assert events_of(p, warning=False) == ["RendezvousStoreCreated"]


def test_the_counts_of_pods_and_nodes() -> None:
    pods = (worker(0), worker(1, **ended(0, "Completed")), worker(2, **ended(1)), worker(3, deleting=NOW + 9))
    observed = steady(workers=pods, last_report=report(pods[0], pods[3], world_size=16), incarnations="0,0,0,0")
    counts = status_of(run(replace(observed, job=job(status=observed.job.status.raw, replicas=4))))
    expected = {"replicas": 1, "succeeded": 1, "failed": 1, "terminating": 1, "active": 2, "worldSize": 16}
    assert {name: counts[name] for name in expected} == expected


def test_a_restart_has_a_time_and_scaling_an_event_when_it_is_done() -> None:
    ending = report(worker(0), worker(1), ended_rounds=(round_ended(1),))
    assert status_of(run(steady(last_report=ending)))["lastRestartTime"] == timestamp(NOW)
    smaller = [condition("FullyScaled", value=False, reason="ScalingUp")]
    p = run(steady(conditions=smaller, lastScaleTime=timestamp(NOW - 9)))
    assert events_of(p) == ["WorldFormed", "Scaled"]
    assert status_of(p)["lastRendezvousTime"] == timestamp(NOW - 30, precise=True)


def test_a_failure_beyond_the_budget_ends_the_job() -> None:
    before = [condition("Running"), condition("Restarting")]
    spent: dict[str, Any] = {"restarts": 3, "restartsCountTowardsMax": 3, "conditions": before}
    pods = (worker(0, **ended(137, "OOMKilled")), worker(1))
    p = run(steady(workers=pods, **spent))
    status_ = status_of(p)
    assert reasons_of(p)["FailureTarget"] == ("True", "MaxRestartsExceeded")
    assert reasons_of(p)["Restarting"] == ("False", "BudgetExhausted")
    assert "lastRestartTime" not in status_
    assert "Failed" not in reasons_of(p)
    assert (status_["restarts"], status_["phase"]) == (3, "Failed")
    assert status_["lastFailure"]["class"] == FailureClass.OOM_KILLED.value
    assert events_of(p) == ["WorkerFailed", "MaxRestartsExceeded"]
    assert status_["incarnations"] == "0,0"


# ---- the end ---------------------------------------------------------------------------------------------------

SUCCEEDED = declared(Outcome.SUCCEEDED)
FINISHED = replace(report(worker(0), worker(1)), phase=RoundPhase.FINISHED, outcome=Outcome.SUCCEEDED)


def test_success_declared_by_the_store_waits_for_the_pods() -> None:
    p = run(steady(last_report=FINISHED))
    assert p.actions == ()
    assert reasons_of(p)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")
    assert "Complete" not in reasons_of(p)
    assert reasons_of(p)["Running"] == ("False", "Finished")


def test_the_success_of_one_node_completes_a_job_whose_policy_is_any() -> None:
    observed = replace(steady(last_report=FINISHED), job=job(status=status(), successPolicy="Any"))
    p = run(observed)
    assert reasons_of(p)["SuccessCriteriaMet"] == ("True", "SuccessPolicy")
    assert "all workers of one pod" in conditions_of(p)["SuccessCriteriaMet"]["message"]
    assert p.operator_view is not None
    assert p.operator_view.settings.success_policy is SuccessPolicy.ANY
    done = run(replace(observed, workers=tuple(worker(i, **ended(0, "Completed", SUCCEEDED)) for i in range(2))))
    assert reasons_of(done)["Complete"] == ("True", "SuccessPolicy")


def test_one_termination_message_proves_success_while_the_store_is_unavailable() -> None:
    pods = (worker(0, **ended(0, "Completed", SUCCEEDED)), worker(1))
    p = run(replace(steady(workers=pods), link=DOWN, stores=()))
    assert reasons_of(p)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")
    assert p.actions == ()
    assert status_of(p)["restarts"] == 0


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_termination_messages_finish_a_job_whose_store_never_reported(outcome: Outcome) -> None:
    succeeded = outcome is Outcome.SUCCEEDED
    cause = None if succeeded else failure(rank=1, message="loss is nan")
    end = ended(0 if succeeded else 1, "Completed" if succeeded else "Error", declared(outcome, cause))
    pods = (worker(0, **end), worker(1, **end))
    p = run(replace(steady(workers=pods), link=LinkView(False, NOW - 60), stores=()))
    kind, reason = ("Complete", "AllAgentsSucceeded") if succeeded else ("Failed", "MaxRestartsExceeded")
    assert reasons_of(p)[kind] == ("True", reason)
    assert status_of(p).get("lastFailure", {}).get("message") == (None if succeeded else "loss is nan")
    message = conditions_of(p)[kind]["message"]
    assert "restarts that only the store knew of are not counted" in message
    assert not [a for a in p.actions if isinstance(a, CreateStore)]


def unreported(*, seen: float, **more: Any) -> Observed:
    """Return a job that pods declare a success, to an operator without a report of its live store."""
    pods = (worker(0, **ended(0, "Completed", SUCCEEDED)), worker(1, **ended(0, "Completed", SUCCEEDED)))
    return replace(steady(workers=pods), link=LinkView(False, NOW - 60), end_seen=seen, **more)


def test_the_end_that_pods_declare_waits_for_the_report_of_a_live_store() -> None:
    """The store knows the restarts, and a new leader has no link to it yet."""
    waiting = run(unreported(seen=NOW))
    assert "SuccessCriteriaMet" not in reasons_of(waiting)
    assert waiting.actions == ()
    assert waiting.requeue_after is not None
    assert waiting.requeue_after <= LAST_REPORT_SECONDS
    pods = unreported(seen=NOW).workers
    last = report(*pods, outcome=Outcome.SUCCEEDED, round=RoundId(1, 0, 2), ended_rounds=(round_ended(1),))
    reported = run(replace(unreported(seen=NOW), link=link(last)))
    assert reasons_of(reported)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")
    assert status_of(reported)["restarts"] == 1


def test_the_end_that_pods_declare_waits_for_one_whole_attempt_to_reach_the_store() -> None:
    assert LONGEST_BACKOFF * MAX_JITTER + CONNECT_TIMEOUT < LAST_REPORT_SECONDS
    turn = replace(unreported(seen=NOW - LAST_REPORT_SECONDS), link=LinkView(False, NOW))
    assert "SuccessCriteriaMet" not in reasons_of(run(turn)), "the first attempt waits for its turn"


@pytest.mark.parametrize(
    "observed",
    [
        unreported(seen=NOW - LAST_REPORT_SECONDS),
        unreported(seen=NOW, stores=()),
        unreported(seen=NOW, leases={"n1": NOW - LEASE_LATE_SECONDS}),
        replace(unreported(seen=NOW), link=LinkView(False, NOW - 60, refused="another key")),
    ],
    ids=["time is over", "no store", "node of the store is down", "link refused"],
)
def test_the_end_that_pods_declare_does_not_wait_for_a_store_that_cannot_report(observed: Observed) -> None:
    assert reasons_of(run(observed))["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")


def test_a_store_that_does_not_know_the_jobs_end_receives_it() -> None:
    pods = (worker(0, **ended(0, "Completed", SUCCEEDED)), worker(1))
    restarted = gathering(worker(1), phase=RoundPhase.RECOVERING)
    p = run(steady(workers=pods, last_report=restarted))
    assert p.operator_view is not None
    assert p.operator_view.finish is not None
    assert (p.operator_view.finish.outcome, p.operator_view.finish.reason) == (Outcome.SUCCEEDED, "AllAgentsSucceeded")
    assert p.operator_view.pods == ()
    again = run(steady(workers=(worker(1),), last_report=restarted, conditions=[MET]))
    assert again.operator_view is not None
    assert again.operator_view.finish is not None
    unfinished = run(steady(last_report=restarted))
    assert unfinished.operator_view is not None
    assert unfinished.operator_view.finish is None


MET = condition("SuccessCriteriaMet", reason="AllAgentsSucceeded", at=NOW - 5)
DONE = (worker(0, **ended(0, "Completed", SUCCEEDED)), worker(1, **ended(0, "Completed", SUCCEEDED)))


def test_a_job_is_complete_once_all_pods_have_ended_and_then_the_store_is_deleted() -> None:
    p = run(steady(workers=DONE, conditions=[MET]))
    assert reasons_of(p)["Complete"] == ("True", "AllAgentsSucceeded")
    status_ = status_of(p)
    assert (status_["phase"], status_["succeeded"], status_["active"], status_["worldSize"]) == ("Succeeded", 2, 0, 0)
    assert status_["completionTime"] == "2027-01-15T08:00:00Z"
    assert p.actions == (
        DeletePod("bert-rdzv-0", "uid-bert-rdzv-0", "the job has ended", grace=STORE_GRACE_SECONDS),
        DeletePod("bert-rdzv-1", "uid-bert-rdzv-1", "the job has ended", grace=STORE_GRACE_SECONDS),
        DeleteService("bert", "n"),
        DeleteService("bert-rdzv", "r"),
    )


def test_a_pod_that_does_not_exit_is_deleted() -> None:
    observed = steady(workers=(DONE[0], worker(1)), conditions=[MET])
    early = run(observed)
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(5.0)
    assert [a.name for a in run(observed, NOW + 6).actions if isinstance(a, DeletePod)] == ["bert-1-0"]


def test_a_scheduled_pod_that_is_not_running_yet_gets_time_to_exit() -> None:
    observed = steady(workers=(DONE[0], worker(1, phase="Pending", node="n1")), conditions=[MET])
    assert run(observed).actions == ()
    unscheduled = steady(workers=(DONE[0], worker(1, phase="Pending", node="")), conditions=[MET])
    assert [a.name for a in run(unscheduled).actions if isinstance(a, DeletePod)] == ["bert-1-0"]


def test_a_pod_stuck_on_a_lost_node_does_not_delay_completion() -> None:
    observed = steady(workers=(DONE[0], worker(1, deleting=NOW - 130)), conditions=[MET])
    assert "Complete" in reasons_of(run(observed))
    terminating = steady(workers=(DONE[0], worker(1, deleting=NOW + 100, node="n9")), conditions=[MET])
    for age, ends in ((20.0, False), (41.0, True)):
        assert ("Complete" in reasons_of(run(replace(terminating, leases={"n9": NOW - age})))) is ends


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_a_terminal_status_is_final(kind: str) -> None:
    first = condition("SuccessCriteriaMet" if kind == "Complete" else "FailureTarget", reason="X")
    observed = replace(steady(workers=(), conditions=[first, condition(kind, reason="X")]), stores=(), link=LinkView())
    children = replace(CHILDREN, nodes=None, rendezvous=None)
    p = run(replace(observed, children=children))
    assert p.actions == ()
    assert reasons_of(p)[kind] == ("True", "X")
    again = run(replace(observed, children=children, job=job(status=status_of(p))))
    assert (again.status, again.actions) == (None, ())


def test_a_failed_job_names_its_cause_and_what_to_do() -> None:
    exhausted = replace(
        report(worker(0), worker(1)), phase=RoundPhase.FINISHED, outcome=Outcome.FAILED, failure=failure(rank=1),
        ended_rounds=(replace(round_ended(4), charged=False),),
    )  # fmt: skip
    p = run(steady(last_report=exhausted, restarts=3, restartsCountTowardsMax=3))
    target = conditions_of(p)["FailureTarget"]
    assert target["reason"] == "MaxRestartsExceeded"
    advice = (
        "correct the cause, or allow more restarts with spec.failurePolicy.maxRestarts, then delete the job and apply"
    )
    for part in ("3 of 3 restarts", "rank 1", "ValueError", "bad", advice):
        assert part in target["message"]
    assert status_of(p)["lastFailure"]["rank"] == 1


def test_a_spec_that_cannot_run_fails_the_job_with_a_message() -> None:
    p = run(Observed(job(template={"spec": {"containers": [{"name": "a", "image": "b"}]}})))
    (failed,) = status_of(p)["conditions"]
    assert (failed["type"], failed["reason"]) == ("Failed", "InvalidSpec")
    assert "command" in failed["message"]
    assert status_of(p)["completionTime"] == timestamp(NOW)


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
    ("name", "pods", "last_report", "fields", "running", "scaled", "phase"),
    [
        ("trains", TWO, report(*TWO), {}, "WorldFormed", "AtDesiredReplicas", "Running"),
        ("starts", TWO, gathering(*TWO), {}, "WaitingForMinReplicas", "ScalingUp", "Starting"),
        (
            "no room", (worker(0), worker(1, **unschedulable())), gathering(worker(0)), {}, "Unschedulable",
            "InsufficientCapacity", "Pending",
        ),
        (
            "no image", (worker(0), worker(1, **NO_IMAGE)), gathering(worker(0)), {}, "ImagePullFailed",
            "ImagePullFailed", "Pending",
        ),
        (
            "no config", (worker(0), worker(1, **NO_CONFIG)), gathering(worker(0)), {}, "PodStartFailed",
            "PodStartFailed", "Pending",
        ),
        (
            "between rounds", TWO, gathering(*TWO, rounds=1), {"rendezvousRound": 1}, "Restarting",
            "BelowDesiredAboveMin", "Restarting",
        ),
        (
            "a hung round ends", TWO, report(*TWO, phase=RoundPhase.ENDING),
            {"phase": "Running", "rendezvousRound": 1, "conditions": [condition("Restarting", value=False)]},
            "Restarting", "BelowDesiredAboveMin", "Restarting",
        ),
        (
            "a replacement joins", TWO, report(*TWO, phase=RoundPhase.ENDING),
            {"phase": "Degraded", "rendezvousRound": 1}, "Restarting", "BelowDesiredAboveMin", "Scaling",
        ),
        (
            "a store recovers", TWO, replace(gathering(*TWO), phase=RoundPhase.RECOVERING),
            {"conditions": [condition("Running")], "active": 2, "worldSize": 2}, "WorldFormed", "AtDesiredReplicas",
            "Running",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) and " " in v else "",
)  # fmt: skip
def test_running_and_fully_scaled(
    name: str,
    pods: tuple[Pod, ...],
    last_report: Report,
    fields: dict[str, Any],
    running: str,
    scaled: str,
    phase: str,
) -> None:
    p = run(steady(workers=pods, last_report=last_report, **fields))
    reasons = reasons_of(p)
    assert (reasons["Running"][1], reasons["FullyScaled"][1]) == (running, scaled)
    assert status_of(p)["phase"] == phase


def test_only_the_current_store_gets_a_confirmation() -> None:
    assert confirmed(without_standby(steady(last_report=report(*TWO, confirmation_request=12.5)))) == 12.5
    other = report(*TWO, confirmation_request=12.5, incarnation=1)
    assert confirmed(without_standby(steady(last_report=other))) == 0.0


R1, R2 = RoundId(1, 0, 1), RoundId(1, 0, 2)
REQUESTING = gathering(worker(0), incarnation=1, confirmation_request=12.5)
HALF = replace(REQUESTING, half_missing_round=R1)


@pytest.mark.parametrize(
    ("name", "last_report", "before", "older_at", "given"),
    [
        ("the old store has ended, its nodes had time to connect", REQUESTING, None, NOW - AGENTS_SWITCH_SECONDS, True),
        ("its nodes may still be connecting", REQUESTING, None, NOW - AGENTS_SWITCH_SECONDS + 0.1, False),
        ("more than half is missing", REQUESTING, LAST_REPORT, NOW, False),
        ("half of the old store's round is missing", HALF, LAST_REPORT, NOW, True),
        ("the old store never reported", HALF, None, NOW, False),
        ("the old store had a newer round", HALF, replace(LAST_REPORT, round=R2), NOW, False),
        (
            "the old store may be confirmed",
            HALF,
            replace(LAST_REPORT, round=None, confirmation_request=11.0),
            NOW,
            False,
        ),
        ("the old store is not its predecessor", replace(HALF, incarnation=2), LAST_REPORT, NOW, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_successor_gets_a_confirmation_once_no_older_store_can_have_a_world(
    name: str, last_report: Report, before: Report | None, older_at: float, given: bool
) -> None:
    current = job(status=status(rendezvous={"incarnation": last_report.incarnation}))
    view = replace(link(last_report), previous_report=before)
    observed = replace(steady(), job=current, link=view, older_store_at=older_at)
    assert confirmed(observed) == (12.5 if given else 0.0)
    assert run(observed).requeue_after is not None or given


@pytest.mark.parametrize(
    ("name", "pod", "known", "lease_age", "given"),
    [
        ("it runs", worker(1), ("bert-1-0",), None, False),
        ("its kubelet reports", worker(1), ("bert-1-0",), LEASE_LATE_SECONDS - 0.1, False),
        ("its kubelet is silent", worker(1), ("bert-1-0",), LEASE_LATE_SECONDS, True),
        ("it is being deleted", worker(1, deleting=NOW + 30), ("bert-1-0",), None, False),
        ("it has ended", worker(1, **ended(137)), ("bert-1-0",), None, True),
        ("it cannot write", worker(1), (), None, True),
        ("the store knows no members", worker(1), None, None, False),
        ("the store knows no members, and it has not started", worker(1, phase="Pending"), None, None, True),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_store_gets_no_confirmation_while_a_pod_that_may_write_runs(
    name: str, pod: Pod, known: tuple[str, ...] | None, lease_age: float | None, given: bool
) -> None:
    last_report = gathering(worker(0), confirmation_request=12.5, pods_that_may_write=known)
    leases = {} if lease_age is None else {pod.node: NOW - lease_age}
    observed = replace(without_standby(steady(workers=(worker(0), pod), last_report=last_report)), leases=leases)
    assert confirmed(observed) == (12.5 if given else 0.0)
    assert given or (run(observed).requeue_after or math.inf) <= LEASE_POLL_SECONDS


def confirmed(observed: Observed) -> float:
    p = run(observed)
    assert p.operator_view is not None
    return p.operator_view.confirmed_request


def test_a_job_larger_than_the_cluster_trains_with_the_scheduled_nodes() -> None:
    pods = (*TWO, worker(2, **unschedulable("0/3 nodes are available: 3 Insufficient cpu.")))
    observed = replace(
        steady(workers=pods, last_report=report(*TWO)),
        job=job(status=status(incarnations="0,0,0", targetReplicas=3), **elastic(2, 4, 3)),
    )
    p = run(observed)
    assert reasons_of(p)["Running"] == ("True", "WorldFormed")
    assert reasons_of(p)["FullyScaled"] == ("False", "InsufficientCapacity")
    scaled = conditions_of(p)["FullyScaled"]
    assert "3 Insufficient cpu" in scaled["message"]
    assert status_of(p)["phase"] == "Degraded"
    assert p.operator_view is not None
    assert [pod.state.value for pod in p.operator_view.pods] == ["running", "running", "unschedulable"]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (EndReason.WORKER_FAILED, ("True", "WorkerFailed")),
        (EndReason.AGENT_LOST, ("True", "AgentLost")),
        (EndReason.NODE_LEFT, ("True", "PodEvicted")),
        (EndReason.SCALING_UP, None),
    ],
)
def test_restarting_is_set_for_faults_only(reason: EndReason, expected: tuple[str, str] | None) -> None:
    p = run(after(round_ended(1, reason), rendezvousRound=1))
    assert reasons_of(p).get("Restarting") == expected


@pytest.mark.parametrize(("reason", "events"), [("ScalingUp", ["InsufficientCapacity"]), ("InsufficientCapacity", [])])
def test_missing_room_is_one_event(reason: str, events: list[str]) -> None:
    pods = (worker(0), worker(1, **unschedulable()))
    before = [condition("FullyScaled", value=False, reason=reason)]
    observed = steady(workers=pods, last_report=report(pods[0]), conditions=before)
    p = run(replace(observed, job=job(status=observed.job.status.raw, **elastic(1, 2))))
    assert reasons_of(p)["FullyScaled"] == ("False", "InsufficientCapacity")
    assert [reason for reason in events_of(p, warning=True) if reason != "WorldFormed"] == events


def test_restarting_names_a_lost_machine() -> None:
    lost = {"name": "n1", "since": timestamp(NOW - 9), "until": timestamp(NOW + 900), "why": "", "reason": "NodeLost"}
    p = run(after(round_ended(1, EndReason.AGENT_LOST), rendezvousRound=1, avoidedNodes=[lost]))
    assert reasons_of(p)["Restarting"] == ("True", "NodeLost")


def test_restarting_ends_with_the_next_world() -> None:
    before = [condition("Restarting", reason="WorkerFailed")]
    p = run(steady(conditions=before, restarts=1, rendezvousRound=1, rendezvous={"incarnation": 0, "round": "1.0.0"}))
    assert reasons_of(p)["Restarting"] == ("False", "WorldFormed")
    assert status_of(p)["rendezvousRound"] == 2
    assert events_of(p) == ["WorldFormed", "RestartedInPlace"]


def test_the_store_gets_the_restart_strategy_and_recreated_pods_did_not_restart_in_place() -> None:
    before = {"conditions": [condition("Restarting", reason="WorkerFailed")], "restarts": 1, "rendezvousRound": 1}
    fields = status(**before, rendezvous={"incarnation": 0, "round": "1.0.0"})
    p = run(replace(steady(), job=job(status=fields, restartStrategy="Recreate")))
    assert p.operator_view is not None
    assert p.operator_view.settings.restart_strategy is RestartStrategy.RECREATE
    assert events_of(p) == ["WorldFormed"]


@pytest.mark.parametrize(
    ("name", "rounds", "last_round", "reported", "becomes"),
    [
        ("first", 0, "", 1, 1),
        ("missed some", 1, "1.0.1", 4, 4),
        ("a new store counts from 1", 7, "1.0.9", 1, 8),
        ("no new round", 7, "1.1.1", 1, 7),
    ],
)
def test_the_round_counter_grows_across_stores(
    name: str, rounds: int, last_round: str, reported: int, becomes: int
) -> None:
    """The newest round of the last store formed at a later time of that store's clock than this one of its own."""
    newest = report(*TWO, rounds=reported, round=RoundId(1, 1, 1), incarnation=1, formed_at=NOW - 500)
    before = {"incarnation": 1, "round": last_round}
    counted: dict[str, Any] = {"rendezvousRound": rounds, "lastRendezvousTime": timestamp(NOW - 20)}
    p = run(replace(steady(last_report=newest, rendezvous=before, **counted), stores=(store(1),)))
    assert (status_of(p)["rendezvousRound"], status_of(p)["rendezvous"]["round"]) == (becomes, "1.1.1")
    assert status_of(p)["rendezvous"]["lastRound"] == {"executionAttempt": 1, "storeIncarnation": 1, "number": 1}


def test_a_round_that_a_new_store_restored_is_not_counted_again() -> None:
    restored = report(*TWO, incarnation=1, round=RoundId(1, 0, 1), formed_at=NOW - 3)
    observed = steady(
        last_report=restored,
        rendezvousRound=4,
        rendezvous={"endpoint": "", "incarnation": 1, "round": "1.0.1"},
        conditions=[condition("Running")],
    )
    p = run(replace(observed, stores=(store(1),)))
    assert status_of(p)["rendezvousRound"] == 4
    assert p.event_records == ()


def test_status_fields_of_a_newer_operator_are_kept() -> None:
    p = plan(steady(novel={"percent": 99}, conditions=[{"type": "Novel", "status": "True"}]), IMAGE, NOW)
    assert status_of(p)["novel"] == {"percent": 99}
    assert {"type": "Novel", "status": "True"} in status_of(p)["conditions"]


def test_a_hang_is_reported_as_a_hang() -> None:
    hung = failure(kind=FailureClass.HANG, exit_code=None, exception="", message="no progress for 60.0 s", step=6)
    ended = round_ended(1, failure=hung, message="rank 0 in bert-0-0: no progress for 60.0 s")
    observed = steady(last_report=gathering(worker(0), worker(1), rounds=1, ended_rounds=(ended,)), rendezvousRound=1)
    p = run(observed)
    status_ = status_of(p)
    assert (status_["lastFailure"]["class"], status_["lastFailure"]["reason"]) == ("Hang", "HangDetected")
    assert conditions_of(p)["Restarting"]["reason"] == "HangDetected"
    assert events_of(p, warning=True) == ["HangDetected"]
    fatal = replace(
        observed,
        job=job(status=status(rendezvousRound=1), hangPolicy={"progressTimeoutSeconds": 60, "action": "FailJob"}),
    )
    last_report = replace(fatal.link.report or report(), outcome=Outcome.FAILED, failure=hung, ended_rounds=())
    failed = conditions_of(run(replace(fatal, link=link(last_report))))["FailureTarget"]
    assert (failed["reason"], "training hung" in failed["message"]) == ("FailurePolicyRule", True)


def test_a_hang_with_action_event_is_reported_once_and_not_charged() -> None:
    hung = failure(kind=FailureClass.HANG, exit_code=None, exception="", message="no progress for 60.0 s", step=6)
    observed = replace(
        steady(last_report=replace(report(worker(0), worker(1)), stall=hung)),
        job=job(status=status(), hangPolicy={"progressTimeoutSeconds": 60, "action": "Event"}),
    )
    p = run(observed)
    status_ = status_of(p)
    assert p.operator_view is not None
    assert p.operator_view.settings.hang_action is HangAction.EVENT
    assert (status_["lastFailure"]["class"], status_["lastFailure"]["pod"]) == ("Hang", "bert-0-0")
    assert (status_["restarts"], status_["restartsCountTowardsMax"], p.actions) == (0, 0, ())
    assert (status_["phase"], "Restarting" in conditions_of(p)) == ("Running", False)
    assert events_of(p, warning=True) == ["HangDetected"]
    # Another pod failed since, and the record of this failure has a field more.
    known = {**status_, "recentFailures": [{**status_["lastFailure"], "recoverySeconds": {}}, {"pod": "bert-1-0"}]}
    again = run(replace(observed, job=job(status={**known, "lastFailure": {"pod": "bert-1-0"}})))
    assert (again.event_records, again.status) == ((), None)
    later = replace(report(worker(0), worker(1)), stall=replace(hung, time=hung.time + 61))
    assert events_of(run(replace(observed, job=job(status=known), link=link(later)))) == ["HangDetected"]


def test_a_condition_of_a_log_rule_that_is_only_reported() -> None:
    met = failure(exit_code=None, exception="", message="loss is nan at step 6", log_rule="steps")
    p = run(steady(last_report=replace(report(worker(0), worker(1)), stall=met)))
    status_ = status_of(p)
    assert (status_["lastFailure"]["class"], status_["lastFailure"]["reason"]) == ("UserError", "LogRule")
    assert (status_["restarts"], p.actions) == (0, ())
    (event,) = [e for e in p.event_records if e.warning]
    assert event.reason == "LogRuleMatched"
    assert event.message == (
        "rank 0 in bert-0-0 on n1 failed: LogRule: loss is nan at step 6; workers are not restarted because the "
        "condition's action is Event"
    )
    again = run(steady(last_report=replace(report(worker(0), worker(1)), stall=met), **status_))
    assert events_of(again, warning=True) == []


def test_warm_fork_off_is_reported_once_per_reason() -> None:
    off = replace(
        report(worker(0), worker(1)), fork_disabled_reason="a forked process hung: why", fork_disabled_nodes=1
    )
    first = run(steady(last_report=off))
    assert status_of(first)["warmFork"] == "off on 1 of 2 pods: a forked process hung: why"
    (event,) = [e for e in first.event_records if e.warning]
    assert (event.reason, event.key) == ("WarmForkOff", "a forked process hung: why")
    known = status_of(first)
    on_all = run(replace(steady(last_report=replace(off, fork_disabled_nodes=2)), job=job(status=known)))
    assert status_of(on_all)["warmFork"].startswith("off on 2 of 2 pods: ")
    assert events_of(on_all, warning=True) == []
    unavailable = replace(steady(), job=job(status=known), link=LinkView(since=NOW))
    assert "warmFork" in (run(unavailable).status or known)
    assert "warmFork" not in status_of(run(replace(steady(), job=job(status=known))))


def test_a_hang_policy_without_steps_is_reported_once() -> None:
    told = replace(report(worker(0), worker(1)), hang_guard="no worker in bert-0-0 has reported a step")
    policy = {"progressTimeoutSeconds": 300}
    first = run(replace(steady(last_report=told), job=job(status=status(), hangPolicy=policy)))
    assert status_of(first)["hangGuard"] == told.hang_guard
    (event,) = [e for e in first.event_records if e.reason == "NoStepsReported"]
    assert (event.message, event.warning) == (told.hang_guard, True)
    again = run(replace(steady(last_report=told), job=job(status=status_of(first), hangPolicy=policy)))
    assert "NoStepsReported" not in [e.reason for e in again.event_records]
    assert "NoStepsReported" not in [e.reason for e in run(steady(last_report=told)).event_records], "no policy"


def test_status_says_what_guards_a_job_without_a_hang_policy() -> None:
    guarded = replace(report(worker(0), worker(1)), hang_guard="ends after 600 s")
    known = status_of(run(steady(last_report=guarded)))
    assert known["hangGuard"] == "ends after 600 s"
    unavailable = replace(steady(), job=job(status=known), link=LinkView(since=NOW))
    assert "hangGuard" in (run(unavailable).status or known)
    assert "hangGuard" not in status_of(run(replace(steady(), job=job(status=known))))


def test_recovery_seconds_are_written_once_beside_their_failure() -> None:
    recovery = RecoverySeconds(("bert-0-0",), detect=0.0012345, stop=0.02, rendezvous=0.001, start=0.06)
    before = {"time": "2027-01-15T07:59:00Z", "pod": "bert-1-0", "class": "Killed"}
    failed = before | {"pod": "bert-0-0"}
    observed = steady(
        last_report=report(worker(0), worker(1), recovery=recovery), recentFailures=[before, failed], lastFailure=failed
    )
    status_ = status_of(run(observed))
    phases = {"detect": 0.001, "stop": 0.02, "rendezvous": 0.001, "start": 0.06}
    assert status_["recentFailures"] == [before, failed | {"recoverySeconds": phases}]
    assert status_["lastFailure"] == failed
    later = replace(
        observed,
        job=job(status=status_),
        link=link(replace(observed.link.report or report(), recovery=replace(recovery, stop=9.0))),
    )
    assert run(later).status is None
