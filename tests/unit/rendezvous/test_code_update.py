"""A job whose code changes while it runs: the round ends by a plan, and each assignment names one digest."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    EndReason,
    EndRound,
    LastMembership,
    MemberState,
    PlanEnd,
    RoundPhase,
    StartRound,
    StepReport,
)
from elasticjob._runtime.contract.messages.wire_form import decode, encode
from support.rendezvous.rounds import SETTINGS, Job, pods


def job_with_code(*indices: int) -> Job:
    """A job of the code `one` with a running round of these indices."""
    job = Job(replace(SETTINGS, code="one"))
    job.operator_view(*pods(*indices))
    job.announce(*indices)
    job.started(*indices)
    assert {job.start_of(index).code for index in indices} == {"one"}
    return job


def test_new_code_ends_the_round_after_a_common_step_and_the_next_one_names_it() -> None:
    job = job_with_code(0, 1)
    job.operator_view(*pods(0, 1), code="two")
    assert isinstance(job.last(0), PlanEnd)
    for index in (0, 1):
        job.send(index, StepReport(job.start_of(index).round, 7 + index))
    end = job.last(0)
    assert isinstance(end, EndRound)
    assert (end.last_step, end.planned) == (8, True)
    job.stopped(0, 1)
    assert [job.start_of(index).code for index in (0, 1)] == ["two", "two"]
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.message, ended.charged) == (EndReason.CODE_UPDATED, "new code two", False)
    job.started(0, 1)
    job.advance(60)
    assert (job.phase(), job.report.rounds) == (RoundPhase.RUNNING, 2)


def test_a_pod_that_comes_back_during_the_update_gets_the_same_code_as_the_others() -> None:
    job = job_with_code(0, 1)
    job.operator_view(*pods(0), *pods(1, incarnation=1), code="two")
    job.disconnect(1)
    job.advance(1)
    job.stopped(0)
    job.announce(1, incarnation=1)
    job.advance(60)
    job.started(0)
    job.advance(60)
    job.stopped(0)
    assert job.members == ["j-0-0", "j-1-1"]
    assert {job.start_of(0).code, job.start_of(1, incarnation=1).code} == {"two"}


def test_code_that_changes_while_a_round_starts_ends_it_once_its_workers_run() -> None:
    job = Job(replace(SETTINGS, code="one"))
    job.operator_view(*pods(0, 1))
    job.announce(0, 1)
    job.operator_view(*pods(0, 1), code="two")
    assert isinstance(job.last(0), StartRound)
    job.started(0, 1)
    assert isinstance(job.last(0), PlanEnd)


def test_no_update_once_a_member_has_succeeded() -> None:
    job = job_with_code(0, 1)
    job.succeed(0)
    job.operator_view(*pods(0, 1), code="two")
    assert not job.sent_end(1)


def test_an_operator_that_sends_no_digest_ends_no_round() -> None:
    job = job_with_code(0, 1)
    job.operator_view(*pods(0, 1), code="")
    assert not job.sent_end(0)


def test_an_older_operator_reads_the_end_as_one_without_a_fault() -> None:
    job = job_with_code(0, 1)
    job.operator_view(*pods(0, 1), code="two")
    job.stopped(0, 1)
    report = decode(encode(job.report, 4))
    assert [ended.reason for ended in report.ended_rounds] == [EndReason.SCALING_UP]  # type: ignore[union-attr]


def test_a_store_that_no_operator_has_reached_stays_with_the_code_of_the_last_round() -> None:
    """Its own settings are of the time when its pod was created, before the update."""
    last = job_with_code(0, 1)
    last.operator_view(*pods(0, 1), code="two")
    last.stopped(0, 1)
    last.started(0, 1)
    job = Job(replace(SETTINGS, code="one"), store=1, recovering=True)
    for index in (0, 1):
        job.announce(index, membership=LastMembership(last.start_of(index), MemberState.RUNNING))
    job.advance(60)
    assert not job.sent_end(0)
    job.fail(0)
    job.stopped(0, 1)
    assert job.start_of(0).round.store_incarnation == 1
    assert [job.start_of(index).code for index in (0, 1)] == ["two", "two"]
