"""Planned ends: who is told what, from the announcement to the last step, or to the fall-back."""

from __future__ import annotations

import pytest

from elasticjob.contract.messages import (
    EndReason,
    EndRound,
    FailureClass,
    Outcome,
    PlanEnd,
    RoundPhase,
    StepReport,
    WorkersSucceeded,
)
from elasticjob.rendezvous.planned_end import ASK_TIMEOUT
from support.rounds import Job, member_of, pods

WHY = "j-2-0 joins"


def planning(*indices: int) -> Job:
    """A round of these indices that a ready newcomer, the next index, is about to end."""
    job = Job()
    job.facts(*pods(*indices), target=len(indices) + 1)
    job.running(*indices)
    job.facts(*pods(*indices, len(indices)))
    job.announce(len(indices))
    return job


def report(job: Job, index: int, step: int | None) -> None:
    job.say(index, StepReport(job.start_of(index).round, step))


def last_steps(job: Job, *indices: int) -> list[object]:
    """What each was told of its end: a last step, `now`, or nothing yet."""
    words = [m for index in indices if (m := job.last(index)) is not None]
    return [w.last_step if w.last_step is not None else "now" for w in words if isinstance(w, EndRound)]


def test_a_planned_end_from_the_question_to_the_next_round() -> None:
    job = planning(0, 1)
    assert [job.last(s) for s in (0, 1)] == [PlanEnd(job.start_of(0).round, WHY)] * 2
    report(job, 0, 7)
    assert last_steps(job, 0, 1) == []
    report(job, 1, 8)
    assert last_steps(job, 0, 1) == [8, 8]
    job.later(60)
    job.stopped(0)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(1)
    assert len(job.members) == 3
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged) == (EndReason.SCALING_UP, False)


@pytest.mark.parametrize("how", ["leaves", "scales down", "joins"])
def test_every_planned_reason_asks_first(how: str) -> None:
    job = planning(0, 1, 2) if how == "joins" else Job()
    if how != "joins":
        job.facts(*pods(0, 1, 2), target=3)
        job.running(0, 1, 2)
    if how == "leaves":
        job.leave(2)
    if how == "scales down":
        job.facts(*pods(0, 1, 2), target=2)
    assert all(isinstance(job.last(index), PlanEnd) for index in range(3))


def test_a_round_whose_workers_have_not_all_started_ends_at_once() -> None:
    job = Job()
    job.facts(*pods(0, 1, 2), target=3)
    job.announce(0, 1, 2)
    job.started(0, 1)
    job.leave(2)
    assert last_steps(job, 0, 1, 2) == ["now"] * 3


def test_scripts_that_do_not_report_are_stopped_at_once() -> None:
    job = planning(0, 1)
    report(job, 0, 7)
    report(job, 1, None)
    assert last_steps(job, 0, 1) == ["now", "now"]
    assert "not all workers report their steps" in job.reasons[-1]


def test_a_node_that_does_not_answer_is_not_waited_for() -> None:
    job = planning(0, 1)
    report(job, 0, 7)
    job.later(ASK_TIMEOUT)
    assert last_steps(job, 0, 1) == ["now", "now"]
    report(job, 1, 9)
    assert last_steps(job, 0, 1) == ["now", "now"]


def test_a_last_step_that_is_not_reached_in_time_is_given_up() -> None:
    job = planning(0, 1)
    report(job, 0, 7)
    report(job, 1, 7)
    job.stopped(0)
    job.later(job.state.settings.graceful_shutdown)
    assert last_steps(job, 0, 1) == [7, "now"]
    job.stopped(1)
    assert len(job.members) == 3


def test_a_failure_on_the_way_ends_it_at_once_and_is_charged() -> None:
    job = planning(0, 1)
    report(job, 0, 7)
    report(job, 1, 7)
    job.fail(1, FailureClass.USER_ERROR)
    assert last_steps(job, 0) == ["now"]
    job.stopped(0, 1)
    assert job.report.ended_rounds[0].reason is EndReason.WORKER_FAILED


def test_a_node_lost_on_the_way_ends_it_at_once() -> None:
    job = planning(0, 1)
    report(job, 0, 7)
    job.gone(1)
    job.later(0.5)
    assert last_steps(job, 0) == ["now"]


@pytest.mark.parametrize("named", [False, True])
def test_who_was_away_is_told_again_what_holds_now(named: bool) -> None:
    job = planning(0, 1)
    job.gone(1)
    report(job, 0, 7)
    if named:
        report(job, 1, 8)
    job.announce(1, membership=member_of(job.start_of(1)))
    if named:
        assert last_steps(job, 1) == [8]
        return
    assert [type(m) for m in job.told["1.0"]].count(PlanEnd) == 2
    report(job, 1, 8)
    assert last_steps(job, 0, 1) == [8, 8]


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    job = planning(0, 1)
    for step in (7, 9):
        report(job, 0, step)
    report(job, 1, 8)
    report(job, 1, 12)
    assert last_steps(job, 0, 1) == [9, 9]


def test_workers_that_are_done_before_the_last_step_have_succeeded() -> None:
    job = planning(0, 1)
    job.succeed(0)
    report(job, 0, 100)
    report(job, 1, 101)
    assert last_steps(job, 0, 1) == [101, 101]
    job.succeed(1)
    assert job.report.outcome is Outcome.SUCCEEDED


def test_who_is_done_while_others_stopped_runs_again() -> None:
    job = planning(0, 1)
    report(job, 0, 7)
    report(job, 1, 7)
    job.say(0, WorkersSucceeded(job.start_of(0).round))
    job.stopped(1)
    assert last_steps(job, 0) == ["now"]


def test_words_of_another_round_are_no_answer() -> None:
    job = planning(0, 1)
    job.say(0, StepReport(job.start_of(0).round._replace(number=9), 3))
    report(job, 1, 7)
    assert last_steps(job, 0, 1) == []
    report(job, 0, 6)
    assert last_steps(job, 0, 1) == [7, 7]


def test_a_member_that_stopped_before_the_last_step_was_known_ends_it_at_once() -> None:
    job = planning(0, 1)
    job.stopped(1)
    assert last_steps(job, 0) == ["now"]
