"""A store that dies, and what its successor makes of what it finds; an operator that is away. Slots stand for nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob.contract.messages import (
    Failure,
    FailureClass,
    Finish,
    MemberState,
    Outcome,
    PodState,
    RoundPhase,
    StartRound,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import LOST_TIMEOUT, Tick
from support.rounds import SETTINGS, Job, job_of, member_of, pods

FAILURE = Failure(FailureClass.KILLED, "j-0-0", 1.0)


def restarted(before: Job, **states: MemberState) -> Job:
    """A successor store, and the nodes of `before` announcing what they run."""
    job = Job(before.state.settings, store=1, recovering=True)
    for name, state in states.items():
        index = int(name[1:])
        job.announce(index, membership=member_of(before.start_of(index), state))
    return job


def test_a_round_whose_ranks_are_all_there_is_restored() -> None:
    job = restarted(job_of(0, 1), n0=MemberState.RUNNING, n1=MemberState.SUCCEEDED)
    assert job.report.round == RoundId(1, 0, 1)
    assert [m.round for told in job.told.values() for m in told if isinstance(m, StartRound)] == [RoundId(1, 0, 1)] * 2
    job.say(0, WorkersFailed(RoundId(1, 0, 1), FAILURE))
    job.say(0, WorkersStopped(RoundId(1, 0, 1), 6000))
    job.say(1, WorkersStopped(RoundId(1, 0, 1), 6001))
    assert job.start_of(0).round == RoundId(1, 1, 1)


def test_a_missing_member_ends_a_restored_round() -> None:
    job = restarted(job_of(0, 1, 2), n0=MemberState.RUNNING, n1=MemberState.RUNNING)
    assert job.phase() is RoundPhase.RECOVERING
    job.facts(*pods(0, 1), target=2)
    assert job.phase() is RoundPhase.ENDING
    assert job.told_to_end(0, 1)


def test_pods_whose_node_is_lost_are_waited_for_as_long_as_a_reconnect_takes() -> None:
    facts = (*pods(0, 1), *pods(2, state=PodState.LOST))
    job = restarted(job_of(0, 1, 2))
    job.facts(*facts, target=3)
    job.later(60)
    assert job.phase() is RoundPhase.RECOVERING
    before = job_of(0, 1, 2)
    for index in (0, 1):
        job.announce(index, membership=member_of(before.start_of(index)))
    job.later(LOST_TIMEOUT - 0.1)
    assert job.phase() is RoundPhase.RECOVERING
    job.later(0.1)
    assert job.told_to_end(0, 1)


def test_a_pod_whose_node_is_lost_and_that_comes_belongs_to_its_round() -> None:
    job = restarted(job_of(0, 1, 2), n0=MemberState.RUNNING, n1=MemberState.RUNNING)
    job.facts(*pods(0, 1), *pods(2, state=PodState.LOST), target=3)
    job.announce(2, membership=member_of(job_of(0, 1, 2).start_of(2)))
    assert (job.phase(), job.report.round) == (RoundPhase.RUNNING, RoundId(1, 0, 1))


def test_without_a_word_of_the_operator_recovery_ends_by_itself() -> None:
    job = restarted(job_of(0, 1, 2), n0=MemberState.RUNNING, n1=MemberState.RUNNING)
    job.later(10)
    assert job.told_to_end(0, 1)


def test_nodes_that_all_come_a_minute_late_are_waited_for_all_the_same() -> None:
    before = job_of(0, 1)
    job = Job(before.state.settings, store=1, recovering=True)
    job.later(60)
    job.announce(0, membership=member_of(before.start_of(0)))
    job.later(9)
    assert job.phase() is RoundPhase.RECOVERING
    job.announce(1, membership=member_of(before.start_of(1)))
    assert (job.phase(), job.report.round, len(job.report.ended_rounds)) == (RoundPhase.RUNNING, RoundId(1, 0, 1), 0)


def test_what_is_said_while_a_store_recovers_counts() -> None:
    job = restarted(job_of(0, 1), n0=MemberState.RUNNING)
    job.say(0, WorkersSucceeded(RoundId(1, 0, 1)))
    job.announce(1, membership=member_of(job_of(0, 1).start_of(1), MemberState.SUCCEEDED))
    assert job.report.outcome is Outcome.SUCCEEDED


def test_a_successor_gives_out_no_round_before_everybody_has_announced() -> None:
    job = Job(SETTINGS, store=1, recovering=True)
    job.announce(0, 1, 2, 3)
    assert job.members == []
    job.facts(*pods(0, 1, 2, 3))
    assert len(job.members) == 4


@pytest.mark.parametrize("phase", list(MemberState))
def test_a_successor_always_gets_to_a_new_round_or_keeps_the_old(phase: MemberState) -> None:
    job = restarted(job_of(0, 1), n0=MemberState.RUNNING, n1=phase)
    job.facts(*pods(0, 1), target=2)
    if job.phase() is RoundPhase.ENDING:
        job.say(0, WorkersStopped(RoundId(1, 0, 1), 6000))
        job.say(1, WorkersStopped(RoundId(1, 0, 1), 6001))
    assert job.phase() is RoundPhase.RUNNING


def test_a_failure_while_the_store_was_away_is_the_cause_and_is_charged_once() -> None:
    before = job_of(0, 1)
    round_id = before.start_of(0).round
    job = restarted(before, n0=MemberState.RUNNING, n1=MemberState.FAILED)
    job.facts(*pods(0, 1), target=2)
    job.say(1, WorkersFailed(round_id, replace(FAILURE, pod="j-1-0")))
    assert job.told_to_end(0)
    for index in (0, 1):
        job.say(index, WorkersStopped(round_id, 6000 + index))
    assert [(e.round, e.charged, e.failure and e.failure.pod) for e in job.report.ended_rounds] == [
        (round_id, True, "j-1-0")
    ]
    assert job.start_of(0).restarts == 1


def test_a_failure_of_which_nothing_runs_any_more_is_charged_once() -> None:
    """Greetings of nodes that have failed or stopped while no store was there."""
    before = job_of(0, 1)
    round_id = before.start_of(0).round
    job = Job(before.state.settings, store=1, recovering=True)
    job.facts(*pods(0, 1), target=2)
    job.announce(1, membership=member_of(before.start_of(1), MemberState.STOPPED))
    job.announce(0, membership=member_of(before.start_of(0), MemberState.FAILED))
    job.say(0, WorkersFailed(round_id, FAILURE))
    for index in (0, 1):
        job.say(index, WorkersStopped(round_id, 6000 + index))
    assert [(e.round, e.charged, e.failure) for e in job.report.ended_rounds] == [(round_id, True, FAILURE)]
    assert job.start_of(0).restarts == 1


def test_where_nothing_runs_any_more_the_others_do_not_wait_for_a_node_that_is_not_warm() -> None:
    before = job_of(0, 1, 2)
    job = Job(before.state.settings, store=1, recovering=True)
    job.facts(*pods(0, 1), *pods(2, inc=1), target=3)
    for index in (0, 1):
        job.announce(index, membership=member_of(before.start_of(index), MemberState.STOPPED))
    job.announce(2, inc=1, ready=False)
    assert job.start_of(0).world_size == 2


def test_a_failure_that_is_told_before_the_last_node_is_back_is_the_cause() -> None:
    before = job_of(0, 1)
    job = restarted(before, n1=MemberState.FAILED)
    job.say(1, WorkersFailed(before.start_of(1).round, replace(FAILURE, pod="j-1-0")))
    job.announce(0, membership=member_of(before.start_of(0)))
    assert job.told_to_end(0, 1)
    for index in (0, 1):
        job.say(index, WorkersStopped(before.start_of(0).round, 6000 + index))
    assert [e.failure and e.failure.pod for e in job.report.ended_rounds] == ["j-1-0"]


def test_a_store_may_die_twice_and_the_next_failure_recovers() -> None:
    job = job_of(0, 1)
    round_id = job.start_of(0).round
    for store in (1, 2):
        successor = Job(job.state.settings, store=store, recovering=True)
        for index in (0, 1):
            successor.announce(index, membership=member_of(job.start_of(index)))
        successor.facts(*pods(0, 1), target=2)
        assert successor.report.round == round_id
        job = successor
    job.fail(1)
    job.stopped(0, 1)
    assert job.start_of(0).round == RoundId(1, 2, 1)
    assert [(e.round, e.charged) for e in job.report.ended_rounds] == [(round_id, True)]


def test_a_store_that_stood_still_for_a_minute_goes_on_as_if_nothing_had_been() -> None:
    job = job_of(0, 1)
    job.now += 60
    job.decide(Tick())
    assert (job.phase(), job.report.rounds, job.told_to_end(0)) == (RoundPhase.RUNNING, 1, False)
    job.fail(1)
    job.now += 60
    job.stopped(0, 1)
    assert job.start_of(0).round == RoundId(1, 0, 2)


def test_where_all_who_are_here_have_succeeded_nobody_runs_again_before_the_operator_has_spoken() -> None:
    job = restarted(job_of(0, 1, 2), n1=MemberState.SUCCEEDED, n2=MemberState.SUCCEEDED)
    job.later(60)
    assert job.phase() is RoundPhase.RECOVERING
    job.facts(finish=Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded"))
    assert job.report.outcome is Outcome.SUCCEEDED
    assert [job.finished(s) for s in (1, 2)] == [Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")] * 2
    job = restarted(job_of(0, 1, 2), n1=MemberState.SUCCEEDED, n2=MemberState.SUCCEEDED)
    job.later(60)
    job.facts(*pods(1, 2))
    assert job.told_to_end(1, 2)


@pytest.mark.parametrize("finish", [Finish(Outcome.SUCCEEDED, "s"), Finish(Outcome.FAILED, "f", "why")])
def test_the_operators_word_on_the_jobs_end_is_final_for_a_store_that_did_not_know(finish: Finish) -> None:
    job = job_of(0, 1)
    job.facts(finish=finish)
    assert (job.report.outcome, job.phase()) == (finish.outcome, RoundPhase.FINISHED)
    assert [job.finished(s) for s in (0, 1)] == [finish] * 2
    job.stopped(0, 1)
    job.facts(*pods(0, 1), target=2)
    job.later(60)
    assert job.report.rounds == 1


# ---- the operator is away


def test_restarts_go_on_by_the_last_known_rules_and_are_kept_until_acknowledged() -> None:
    job = job_of(0, 1, max_restarts=2)
    job.operator = False
    ends = []
    for _ in range(3):
        ends.append(job.start_of(1).round)
        job.fail(1)
        job.stopped(0, 1)
        if job.report.outcome is None:
            job.started(0, 1)
    assert [e.round for e in job.report.ended_rounds] == ends
    assert [e.charged for e in job.report.ended_rounds] == [True, True, False]
    assert (job.report.outcome, job.start_of(0).restarts) == (Outcome.FAILED, 2)
    job.later(3600)
    assert len(job.report.ended_rounds) == 3
    job.facts(*pods(0, 1), charged=1, charged_round=ends[0])
    assert [e.round for e in job.report.ended_rounds] == ends[1:]
    job.facts(*pods(0, 1), charged=2, charged_round=ends[2])
    assert not job.report.ended_rounds
