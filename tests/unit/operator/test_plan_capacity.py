"""Pods that the cluster has no room for: withdrawn above the minimum, given back below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Outcome
from elasticjob_operator.actions import CreateWorker, DeletePod
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.observation.job_memory import JobMemory
from elasticjob_operator.plan import Plan
from elasticjob_operator.plan.pods.capacity import FIRST_BACK_OFF, LONGEST_BACK_OFF
from support.operator.build import (
    NOW,
    UID,
    Raw,
    condition,
    conditions_of,
    declared,
    elastic,
    ended,
    gathering,
    job,
    link,
    reasons_of,
    report,
    run,
    status,
    status_of,
    steady,
    unschedulable,
    worker,
)

TRAINS: Raw = {
    "rendezvousRound": 1,
    "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0, "standby": 1, "round": "1.0.1"},
}


def spec_of(low: int, high: int, replicas: int | None = None, **policy: Any) -> Raw:
    spec = elastic(low, high, high if replicas is None else replicas)
    spec["elasticPolicy"] |= {"faultyScaleDownSeconds": 60} | policy
    return spec


def seen_at(pod: Pod, at: float) -> Pod:
    return replace(pod, seen=at)


def pending(index: int, incarnation: int = 0, *, since: float = NOW - 100) -> Pod:
    return seen_at(worker(index, incarnation, **unschedulable()), since)


def trains(spec: Raw, *pods: Pod, incarnations: str = "0,0,0,0", **fields: Any) -> Observed:
    """Return a job whose running pods train; `fields` are of its status."""
    known = status(**(TRAINS | {"incarnations": incarnations, "targetReplicas": 4} | fields))
    observed = steady(workers=pods, last_report=report(*(p for p in pods if p.running)))
    return replace(observed, job=job(status=known, **spec))


def waits(spec: Raw, *pods: Pod, **fields: Any) -> Observed:
    """Return a job that has not trained yet."""
    observed = steady(workers=pods, last_report=gathering(*(p for p in pods if p.running)))
    known = {"incarnations": "0,0,0", "targetReplicas": 3} | fields
    return replace(observed, job=job(status=status(**known), **spec))


def then(before: Observed, p: Plan, *pods: Pod) -> Observed:
    """Return the job with the status of the plan, and these pods."""
    return replace(before, job=replace(before.job, status=job(status=status_of(p)).status), workers=pods)


def created(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, CreateWorker)]


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


# ---- above the minimum: elasticPolicy.faultyScaleDownSeconds -------------------------------------------------------

ELASTIC = spec_of(1, 4)
WITH_SPARE = spec_of(1, 2, spares=1)
TWO = (worker(0), worker(2))
SCALED: Raw = {"scaledDown": {"replicas": 4, "indices": "1,3"}, "targetReplicas": 2}


def test_pods_without_room_are_withdrawn_after_the_time_except_for_one_and_the_target_is_lowered() -> None:
    early = trains(ELASTIC, *TWO, pending(1, since=NOW - 59), pending(3, since=NOW - 59))
    p = run(early)
    assert (created(p), deleted(p), status_of(p)["targetReplicas"]) == ([], [], 4)
    assert p.requeue_after == pytest.approx(1)
    p = run(early, NOW + 1)
    assert deleted(p) == ["bert-3-0"]
    assert status_of(p)["targetReplicas"] == 2
    ranges = [{"first": 1, "last": 1}, {"first": 3, "last": 3}]
    assert status_of(p)["scaledDown"] == {"replicas": 4, "indices": "1,3", "indexRanges": ranges}
    found = conditions_of(p)["FullyScaled"]
    assert (found["status"], found["reason"]) == ("False", "InsufficientCapacity")
    assert found["message"].endswith("status.targetReplicas is 2 until the cluster has room")
    messages = [e.message for e in p.event_records if e.reason == "InsufficientCapacity"]
    assert "no Node for 2 pods after 60 s: status.targetReplicas is 2 until the cluster has room" in messages
    assert p.operator_view is not None
    assert p.operator_view.settings.target == 4
    assert status_of(p)["phase"] == "Degraded"
    again = run(then(early, p, *TWO, pending(1)), NOW + 2)
    assert (created(again), deleted(again), again.event_records) == ([], [], ())
    assert status_of(again)["scaledDown"] == status_of(p)["scaledDown"]


def test_an_operator_that_restarts_keeps_what_is_withdrawn() -> None:
    p = run(trains(ELASTIC, *TWO, pending(1, since=NOW), **SCALED))
    assert (created(p), deleted(p)) == ([], [])
    assert status_of(p)["targetReplicas"] == 2


def test_the_other_pods_are_asked_for_again_once_the_pending_one_has_a_machine() -> None:
    placed = worker(1, phase="Pending")
    p = run(trains(ELASTIC, *TWO, placed, **SCALED))
    assert created(p) == ["bert-3-1"]
    assert status_of(p)["targetReplicas"] == 4
    assert "scaledDown" not in status_of(p)
    assert "PodReplaced" not in [e.reason for e in p.event_records]


def test_more_replicas_ask_for_all_pods_again() -> None:
    p = run(trains(spec_of(1, 5, 5), *TWO, pending(1, since=NOW), **SCALED))
    assert created(p) == ["bert-3-1", "bert-4-0"]
    assert status_of(p)["targetReplicas"] == 5
    assert "scaledDown" not in status_of(p)


def test_fewer_replicas_do_without_missing_pods_and_ask_for_none() -> None:
    p = run(trains(spec_of(1, 5, 3), *TWO, pending(1, since=NOW), **SCALED))
    assert (created(p), deleted(p)) == ([], [])
    assert status_of(p)["scaledDown"] == {
        "replicas": 3, "indices": "1", "indexRanges": [{"first": 1, "last": 1}],
    }  # fmt: skip
    p = run(trains(spec_of(1, 5, 2), *TWO, pending(1, since=NOW), **SCALED))
    assert (created(p), deleted(p)) == ([], ["bert-1-0"])
    assert status_of(p)["vacantIndices"] == [{"first": 1, "last": 1, "incarnation": 0}]
    assert status_of(p)["targetReplicas"] == 2
    assert "scaledDown" not in status_of(p)


def test_a_target_that_the_operator_lowers_is_no_scaling_of_the_user() -> None:
    p = run(trains(ELASTIC, *TWO, pending(1), pending(3)))
    assert not {"ScalingDown", "ScalingUp"} & {e.reason for e in p.event_records}
    assert "lastScaleTime" not in status_of(p)
    released = run(trains(ELASTIC, *TWO, worker(1), **SCALED))
    assert not {"ScalingDown", "ScalingUp"} & {e.reason for e in released.event_records}


def test_a_job_below_its_minimum_asks_for_every_pod() -> None:
    lost = replace(
        trains(spec_of(2, 4), worker(0), pending(1), pending(2, since=NOW - 5), **SCALED),
        link=link(gathering(worker(0))),
    )
    p = run(lost)
    assert created(p) == ["bert-3-1"]
    assert "scaledDown" not in status_of(p)


@pytest.mark.parametrize(
    ("name", "observed"),
    [
        ("no room for long, but the machine pulls an image", trains(ELASTIC, *TWO, worker(1, phase="Pending"))),
        ("a fixed size", trains({"replicas": 4}, *TWO, pending(1), pending(3))),
        ("no round", replace(trains(ELASTIC, *TWO, pending(1), pending(3)), link=link(gathering(*TWO)))),
        ("only a spare is missing", trains(WITH_SPARE, *TWO, pending(1), incarnations="0,0,0", targetReplicas=2)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_withdraws_no_pod(name: str, observed: Observed) -> None:
    p = run(observed)
    assert deleted(p) == []
    assert "scaledDown" not in (p.status or {})


def test_pods_that_a_quota_refuses_are_withdrawn_and_one_is_tried_on() -> None:
    refused = {f"bert-{i}-0": Refusal(RefusalReason.QUOTA_EXCEEDED, "quota", NOW + 5, NOW - 60) for i in (1, 3)}
    p = run(replace(trains(ELASTIC, *TWO), refusals=refused))
    assert status_of(p)["scaledDown"]["indices"] == "1,3"
    due = run(replace(trains(ELASTIC, *TWO, **SCALED), refusals=refused), NOW + 5)
    assert created(due) == ["bert-1-0"]
    skipped = {name: replace(refusal, skipped=True) for name, refusal in refused.items()}
    p = run(replace(trains(ELASTIC, *TWO), refusals=skipped))
    assert "scaledDown" not in (p.status or {})


def test_the_lowered_target_keeps_to_the_step() -> None:
    spec = spec_of(1, 5, replicaIncrementStep=2)
    running = (worker(0), worker(2), worker(3), worker(4))
    observed = trains(spec, *running, pending(1), incarnations="0,0,0,0,0")
    active = replace(report(*running[:3]), active=3)
    p = run(replace(observed, link=link(active)))
    assert status_of(p)["targetReplicas"] == 3


def test_the_reason_is_the_fault_of_a_node_while_one_is_avoided() -> None:
    avoided = {"name": "n3", "since": timestamp(NOW - 100), "until": timestamp(NOW + 9000), "reason": "NodeLost"}
    spec = spec_of(1, 3)
    p = run(trains(spec, *TWO, pending(1), incarnations="0,0,0", avoidedNodes=[avoided]))
    assert status_of(p)["targetReplicas"] == 2
    assert reasons_of(p)["FullyScaled"] == ("False", "NodeFault")


# ---- below the minimum: waitForMinSeconds --------------------------------------------------------------------------

FIXED: Raw = {"replicas": 3, "waitForMinSeconds": 60}


def below_min(since: float = NOW - 60, spec: Raw = FIXED, **fields: Any) -> Observed:
    """Return a job that holds one machine and waits for two more since this time."""
    return waits(spec, worker(0), pending(1, since=since), pending(2, since=since + 1), **fields)


def test_a_job_below_its_minimum_gives_its_pods_back_after_the_time() -> None:
    early = run(below_min(NOW - 59))
    assert deleted(early) == []
    assert early.requeue_after == pytest.approx(1)
    p = run(below_min())
    assert deleted(p) == ["bert-0-0", "bert-1-0", "bert-2-0"]
    assert created(p) == []
    assert status_of(p)["backOff"] == {"attempts": 1, "since": timestamp(NOW)}
    assert status_of(p)["phase"] == "Pending"
    assert reasons_of(p)["Running"] == ("False", "BackedOff")
    assert reasons_of(p)["FullyScaled"] == ("False", "InsufficientCapacity")
    assert p.requeue_after is not None
    assert FIRST_BACK_OFF <= p.requeue_after < 2 * FIRST_BACK_OFF
    again = timestamp(float(int(NOW + p.requeue_after) + 1))
    assert conditions_of(p)["Running"]["message"] == (
        "the cluster had no room for at least 3 pods for 60 s, so the job has given its pods back (1 time in a row). "
        f"The operator tries again at {again}"
    )
    assert [e.reason for e in p.event_records if e.key == "back-off 1"] == ["InsufficientCapacity"]
    assert p.operator_view is not None
    assert all(pod.state.value == "draining" for pod in p.operator_view.pods)


def test_the_job_tries_again_after_a_delay_and_counts_until_a_round_forms() -> None:
    p = run(below_min())
    delay = p.requeue_after
    assert delay is not None
    gone = replace(below_min(), workers=(), job=job(status=status_of(p), **FIXED), back_off_seen=NOW + 0.5)
    waiting = run(gone, NOW + delay)
    assert (created(waiting), reasons_of(waiting)["Running"]) == ([], ("False", "BackedOff"))
    due = run(gone, NOW + delay + 0.5)
    assert created(due) == ["bert-0-1", "bert-1-1", "bert-2-1"]
    assert status_of(due)["backOff"] == {"attempts": 1}
    assert "PodReplaced" not in [e.reason for e in due.event_records]
    asks = job(status=status_of(due), **FIXED)
    pods = (worker(0, 1), worker(1, 1), pending(2, 1, since=NOW + 20))
    once_more = run(replace(below_min(), workers=pods, job=asks), NOW + 80)
    assert status_of(once_more)["backOff"] == {"attempts": 2, "since": timestamp(NOW + 80)}
    running = tuple(worker(i, 1) for i in range(3))
    done = run(replace(below_min(), workers=running, job=asks, link=link(report(*running))))
    assert "backOff" not in status_of(done)


@pytest.mark.parametrize(
    ("attempts", "delay"), [(0, FIRST_BACK_OFF), (1, 2 * FIRST_BACK_OFF), (3, 8 * FIRST_BACK_OFF), (9, 300.0)]
)
def test_the_delay_doubles_and_is_different_for_each_job_and_attempt(attempts: int, delay: float) -> None:
    observed = below_min(backOff={"attempts": attempts})
    uids = [UID, *(f"another-{n}" for n in range(9))]
    found = [run(replace(observed, job=replace(observed.job, uid=uid))).requeue_after for uid in uids]
    delays = [seconds for seconds in found if seconds is not None]
    assert all(delay <= seconds < 2 * delay for seconds in delays)
    assert max(delays) - min(delays) > delay / 4
    assert len(set(delays)) == len(uids)
    assert delay <= LONGEST_BACK_OFF


@pytest.mark.parametrize(
    ("name", "observed"),
    [
        ("no limit", below_min(NOW - 9999, {"replicas": 3})),
        ("room for the minimum", below_min(NOW - 9999, elastic(1, 3, 3) | {"waitForMinSeconds": 60})),
        ("the machines pull an image", waits(FIXED, *(worker(i, phase="Pending") for i in range(3)))),
        ("below its minimum only lately", waits(FIXED, worker(0), worker(1), pending(2, since=NOW - 50))),
        (
            "the second missing pod counts",
            waits(
                elastic(2, 3, 3) | {"waitForMinSeconds": 60},
                worker(0),
                pending(1, since=NOW - 99),
                pending(2, since=NOW - 50),
            ),
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_job_that_keeps_its_pods(name: str, observed: Observed) -> None:
    p = run(observed)
    assert deleted(p) == []
    assert "backOff" not in (p.status or {})


def test_a_job_that_trains_gives_nothing_back() -> None:
    spec = spec_of(2, 4) | {"waitForMinSeconds": 60}
    p = run(trains(spec, *TWO, pending(1, since=NOW - 50), pending(3, since=NOW - 50)))
    assert deleted(p) == []


def test_without_the_field_a_job_that_backed_off_asks_for_its_pods_at_once() -> None:
    fields = {"backOff": {"attempts": 4, "since": timestamp(NOW)}}
    p = run(waits({"replicas": 3}, **fields))
    assert created(p) == ["bert-0-1", "bert-1-1", "bert-2-1"]
    assert "backOff" not in status_of(p)


def test_a_suspended_job_does_not_back_off() -> None:
    p = run(below_min(spec=FIXED | {"suspend": True}))
    assert "backOff" not in status_of(p)
    assert reasons_of(p)["Running"] == ("False", "Suspended")


@pytest.mark.parametrize("met", [[], [condition("SuccessCriteriaMet", reason="AllAgentsSucceeded")]], ids=str)
def test_a_job_that_has_ended_no_longer_counts_how_often_it_gave_its_pods_back(met: list[Raw]) -> None:
    """A short job may end before the operator sees its round."""
    fields = status(conditions=met) | {"backOff": {"attempts": 1}}
    pods = tuple(worker(index, **ended(0, "Completed", declared(Outcome.SUCCEEDED))) for index in range(2))
    observed = replace(
        steady(workers=pods), job=job(status=fields, **FIXED), link=LinkView(connected=False, since=NOW - 12), stores=()
    )
    p = run(observed)
    assert reasons_of(p)["SuccessCriteriaMet"] == ("True", "AllAgentsSucceeded")
    assert "backOff" not in status_of(p)


def test_a_refusal_keeps_the_time_of_the_first_one_in_a_row() -> None:
    memory = JobMemory(UID)
    for now in (NOW, NOW + 5):
        memory.record_refusal("bert-1-0", RefusalReason.QUOTA_EXCEEDED, "quota", now)
    assert memory.refusals["bert-1-0"].since == NOW
    memory.record_created("bert-1-0")
    memory.record_refusal("bert-1-0", RefusalReason.QUOTA_EXCEEDED, "quota", NOW + 9)
    assert memory.refusals["bert-1-0"].since == NOW + 9
