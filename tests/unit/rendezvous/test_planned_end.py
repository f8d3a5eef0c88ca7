"""Planned ends: the messages to each agent until all stop at the last step, or at once if the plan fails."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract.messages import (
    EndReason,
    EndRound,
    FailureClass,
    Outcome,
    PlanEnd,
    PodState,
    RoundPhase,
    StepReport,
    WorkersSucceeded,
)
from elasticjob._runtime.rendezvous.rounds.ends.planned_end import STEP_REPORT_TIMEOUT
from elasticjob._runtime.rendezvous.state import RECONNECT_GRACE, STOP_TIMEOUT
from support.rendezvous.rounds import Job, membership_of, pods

REASON = "1 worker pod can join: j-2-0"


def planning(*indices: int, **settings: Any) -> Job:
    """A job with a running round of these indices, which a ready agent of the next index has begun to end."""
    job = Job()
    job.operator_view(*pods(*indices), target=len(indices) + 1, **settings)
    job.running(*indices)
    job.operator_view(*pods(*indices, len(indices)))
    job.announce(len(indices))
    return job


def report_step(job: Job, index: int, step: int | None) -> None:
    job.send(index, StepReport(job.start_of(index).round, step))


def last_steps(job: Job, *indices: int) -> list[object]:
    """Return the last step that was sent to each agent, "now" for an end at once; nothing for an agent without an
    end."""
    messages = [m for index in indices if (m := job.last(index)) is not None]
    return [m.last_step if m.last_step is not None else "now" for m in messages if isinstance(m, EndRound)]


def test_a_planned_end_from_the_step_reports_to_the_next_round() -> None:
    job = planning(0, 1)
    assert [job.last(index) for index in (0, 1)] == [PlanEnd(job.start_of(0).round, REASON)] * 2
    report_step(job, 0, 7)
    assert last_steps(job, 0, 1) == []
    report_step(job, 1, 8)
    assert last_steps(job, 0, 1) == [8, 8]
    job.advance(60)
    job.stopped(0)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(1)
    assert len(job.members) == 3
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged) == (EndReason.SCALING_UP, False)


@pytest.mark.parametrize("reason", ["a node leaves", "scale down", "a node joins"])
def test_every_planned_reason_collects_steps_first(reason: str) -> None:
    job = planning(0, 1, 2) if reason == "a node joins" else Job()
    if reason != "a node joins":
        job.operator_view(*pods(0, 1, 2), target=3)
        job.running(0, 1, 2)
    if reason == "a node leaves":
        job.leave(2)
    if reason == "scale down":
        job.operator_view(*pods(0, 1, 2), target=2)
    assert all(isinstance(job.last(index), PlanEnd) for index in range(3))


def test_a_round_whose_workers_have_not_all_started_ends_at_once() -> None:
    job = Job()
    job.operator_view(*pods(0, 1, 2), target=3)
    job.announce(0, 1, 2)
    job.started(0, 1)
    job.leave(2)
    assert last_steps(job, 0, 1, 2) == ["now"] * 3


def test_scripts_that_do_not_report_are_stopped_at_once() -> None:
    job = planning(0, 1)
    report_step(job, 0, 7)
    report_step(job, 1, None)
    assert last_steps(job, 0, 1) == ["now", "now"]
    assert "not all workers report their steps" in job.reasons[-1]


def test_all_stop_at_once_if_a_node_does_not_report_in_time() -> None:
    job = planning(0, 1)
    report_step(job, 0, 7)
    job.advance(STEP_REPORT_TIMEOUT)
    assert last_steps(job, 0, 1) == ["now", "now"]
    report_step(job, 1, 9)
    assert last_steps(job, 0, 1) == ["now", "now"]


def test_a_last_step_that_is_not_reached_in_time_is_abandoned() -> None:
    job = planning(0, 1)
    report_step(job, 0, 7)
    report_step(job, 1, 7)
    job.stopped(0)
    job.advance(job.state.settings.graceful_shutdown)
    assert last_steps(job, 0, 1) == [7, "now"]
    job.stopped(1)
    assert len(job.members) == 3


def test_a_failure_before_the_last_step_ends_the_round_at_once_and_is_charged() -> None:
    job = planning(0, 1)
    report_step(job, 0, 7)
    report_step(job, 1, 7)
    job.fail(1, FailureClass.USER_ERROR)
    assert last_steps(job, 0) == ["now"]
    job.stopped(0, 1)
    assert job.report.ended_rounds[0].reason is EndReason.WORKER_FAILED


def test_a_node_lost_before_the_last_step_ends_the_round_at_once() -> None:
    job = planning(0, 1)
    report_step(job, 0, 7)
    job.disconnect(1)
    job.advance(0.5)
    assert last_steps(job, 0) == ["now"]


@pytest.mark.parametrize("last_step_known", [False, True])
def test_a_node_that_reconnects_gets_the_present_message_again(last_step_known: bool) -> None:
    job = planning(0, 1)
    job.disconnect(1)
    report_step(job, 0, 7)
    if last_step_known:
        report_step(job, 1, 8)
    job.announce(1, membership=membership_of(job.start_of(1)))
    if last_step_known:
        assert last_steps(job, 1) == [8]
        return
    assert [type(m) for m in job.sent["1.0"]].count(PlanEnd) == 2
    report_step(job, 1, 8)
    assert last_steps(job, 0, 1) == [8, 8]


def test_a_step_report_after_the_last_step_is_known_changes_nothing() -> None:
    job = planning(0, 1)
    for step in (7, 9):
        report_step(job, 0, step)
    report_step(job, 1, 8)
    report_step(job, 1, 12)
    assert last_steps(job, 0, 1) == [9, 9]


def test_workers_that_are_done_before_the_last_step_have_succeeded() -> None:
    job = planning(0, 1)
    job.succeed(0)
    report_step(job, 0, 100)
    report_step(job, 1, 101)
    assert last_steps(job, 0, 1) == [101, 101]
    job.succeed(1)
    assert job.report.outcome is Outcome.SUCCEEDED


def test_a_node_that_succeeded_while_others_stopped_runs_again() -> None:
    job = planning(0, 1)
    report_step(job, 0, 7)
    report_step(job, 1, 7)
    job.send(0, WorkersSucceeded(job.start_of(0).round))
    job.stopped(1)
    assert last_steps(job, 0) == ["now"]


def test_step_reports_of_another_round_are_ignored() -> None:
    job = planning(0, 1)
    job.send(0, StepReport(job.start_of(0).round._replace(number=9), 3))
    report_step(job, 1, 7)
    assert last_steps(job, 0, 1) == []
    report_step(job, 0, 6)
    assert last_steps(job, 0, 1) == [7, 7]


def test_a_member_that_stopped_before_the_last_step_was_known_ends_the_round_at_once() -> None:
    job = planning(0, 1)
    job.stopped(1)
    assert last_steps(job, 0) == ["now"]


# ---- the time from SIGTERM to SIGKILL

GRACEFUL, STOP_GRACE = 20.0, 2.0


def planning_with_grace(*indices: int) -> Job:
    return planning(*indices, graceful_shutdown=GRACEFUL, stop_grace=STOP_GRACE)


def graces(job: Job, *indices: int) -> list[float]:
    """Return the grace period in the last end that was sent to each agent."""
    return [m.grace_seconds for index in indices if isinstance(m := job.last(index), EndRound)]


@pytest.mark.parametrize(
    ("why", "grace"),
    [
        ("a node leaves", GRACEFUL),
        ("its pod is deleted", GRACEFUL),
        ("scale down", GRACEFUL),
        ("a node joins", GRACEFUL),
        ("a worker fails", STOP_GRACE),
        ("a node is lost", STOP_GRACE),
        ("a worker fails on a node that leaves", STOP_GRACE),
    ],
)
def test_only_peers_of_a_failure_get_the_short_grace(why: str, grace: float) -> None:
    job = Job()
    job.operator_view(*pods(0, 1, 2), target=3, graceful_shutdown=GRACEFUL, stop_grace=STOP_GRACE)
    job.running(0, 1, 2)
    if why == "a node leaves":
        job.leave(2)
    elif why == "its pod is deleted":
        job.operator_view(*pods(0, 1), *pods(2, state=PodState.DRAINING))
    elif why == "scale down":
        job.operator_view(*pods(0, 1, 2), target=2)
    elif why == "a node joins":
        job.operator_view(*pods(0, 1, 2, 3), target=4)
        job.announce(3)
    elif why == "a worker fails":
        job.fail(2)
    elif why == "a node is lost":
        job.disconnect(2)
        job.advance(0.5)
    else:
        job.leave(2)
        job.fail(2)
    if why in ("a node leaves", "its pod is deleted", "scale down", "a node joins"):
        report_step(job, 2, None)
    assert graces(job, 0, 1) == [grace, grace]


def test_a_round_that_has_not_started_everywhere_ends_on_plan_with_the_graceful_time() -> None:
    job = Job()
    job.operator_view(*pods(0, 1, 2), target=3, graceful_shutdown=GRACEFUL)
    job.announce(0, 1, 2)
    job.started(0, 1)
    job.leave(2)
    assert graces(job, 0, 1, 2) == [GRACEFUL] * 3


@pytest.mark.parametrize(
    ("what", "after", "grace"),
    [
        ("no report in time", STEP_REPORT_TIMEOUT, GRACEFUL - STEP_REPORT_TIMEOUT),
        ("the last step is not reached", GRACEFUL, STOP_GRACE),
        ("a node succeeds instead", 5.0, GRACEFUL - 5.0),
        ("a worker fails", 5.0, STOP_GRACE),
        ("a node is lost", 5.0, STOP_GRACE),
    ],
)
def test_a_plan_that_fails_leaves_the_rest_of_the_graceful_time(what: str, after: float, grace: float) -> None:
    job = planning_with_grace(0, 1)
    report_step(job, 0, 7)
    if what != "no report in time":
        report_step(job, 1, 7)
        assert graces(job, 0, 1) == [GRACEFUL] * 2
    if what == "a node is lost":
        job.advance(after - RECONNECT_GRACE)
        job.disconnect(1)
        job.advance(RECONNECT_GRACE)
    else:
        job.advance(after)
    if what == "a node succeeds instead":
        job.succeed(0)
        job.stopped(1)
    if what == "a worker fails":
        job.fail(1)
    assert last_steps(job, 0) == ["now"]
    assert graces(job, 0) == [grace]


def test_a_node_that_saves_in_its_graceful_time_is_not_lost() -> None:
    job = planning_with_grace(0, 1)
    report_step(job, 0, None)
    job.stopped(0)
    job.advance(GRACEFUL + STOP_TIMEOUT - 1)
    assert job.members == ["j-0-0", "j-1-0"]
    job.advance(1)
    assert [e.lost_pods for e in job.report.ended_rounds] == [("j-1-0",)]


def test_a_node_that_reconnects_gets_what_is_left_of_the_graceful_time() -> None:
    job = planning_with_grace(0, 1)
    report_step(job, 0, None)
    job.advance(5)
    job.disconnect(1)
    job.announce(1, membership=membership_of(job.start_of(1)))
    assert graces(job, 1) == [GRACEFUL - 5]
