"""Stages: the coordinator finishes one once all members have ended it, and each round names how many are finished."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import (
    EndRound,
    LastMembership,
    MemberState,
    StageBegan,
    StageEnded,
    StageFinished,
    StartRound,
    StoreActive,
    SuccessPolicy,
)
from elasticjob._runtime.contract.names import MAX_LAUNCHERS
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import AgentDisconnected, AgentMessage, OperatorViewReceived, initial_state
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, job_of, pods


def ended(job: Job, *indices: int, stage: int = 1) -> None:
    for index in indices:
        job.send(index, StageEnded(job.start_of(index).round, stage))


def finished(job: Job, index: int, incarnation: int = 0) -> list[int]:
    """The stages that a node was told to be finished."""
    return [m.stage for m in job.sent[agent_id(index, incarnation)] if isinstance(m, StageFinished)]


def replace_node(job: Job, index: int) -> None:
    """Let a node be lost, the others stop, and its successor join them."""
    job.disconnect(index)
    job.advance(1)
    job.stopped(*({0, 1} - {index}))
    job.operator_view(*pods(*({0, 1} - {index})), *pods(index, incarnation=1))
    job.announce(index, incarnation=1)
    job.advance(60)


def test_a_stage_is_finished_once_all_members_have_ended_it() -> None:
    job = job_of(0, 1)
    assert job.start_of(0).finished_stages == 0
    ended(job, 0)
    assert (finished(job, 0), finished(job, 1)) == ([], [])
    ended(job, 1)
    assert (finished(job, 0), finished(job, 1)) == ([1], [1])
    ended(job, 1, 0, stage=2)
    assert (finished(job, 0), finished(job, 1)) == ([1, 2], [1, 2])
    assert "stage 2 is finished" in job.reasons[-1]
    job.succeed(0, 1)
    assert job.finished(0) is not None


def test_the_next_round_and_a_new_pod_learn_what_is_finished() -> None:
    job = job_of(0, 1)
    ended(job, 0, 1)
    replace_node(job, 1)
    assert job.start_of(1, incarnation=1).finished_stages == 1
    assert job.start_of(0).finished_stages == 1


def test_a_stage_that_not_all_had_ended_runs_again() -> None:
    job = job_of(0, 1)
    ended(job, 0)
    replace_node(job, 1)
    assert job.start_of(0).finished_stages == 0
    job.send(1, StageEnded(job.start_of(1, incarnation=1).round, 1), incarnation=1)
    assert finished(job, 0) == []  # what the last round has reported does not count


def test_what_a_lost_member_has_reported_counts() -> None:
    job = job_of(0, 1)
    ended(job, 0)
    job.disconnect(0)
    ended(job, 1)
    assert finished(job, 1) == [1]
    job.announce(0, membership=LastMembership(job.start_of(0), MemberState.RUNNING, ended_stage=1))
    assert finished(job, 0) == [1]  # again, with its assignment
    assert job.state.finished_stages == 1


def test_a_failure_ends_a_round_whose_stage_some_have_ended() -> None:
    job = job_of(0, 1)
    ended(job, 0)
    job.fail(1)
    assert isinstance(job.last(0), EndRound)
    job.stopped(0, 1)
    assert job.start_of(0).finished_stages == 0


def test_a_member_whose_command_has_succeeded_has_passed_all_stages() -> None:
    job = job_of(0, 1)
    ended(job, 0)
    job.succeed(1)
    assert finished(job, 0) == [1]
    job.succeed(0)
    assert job.finished(0) is not None


def test_with_any_one_member_is_enough() -> None:
    job = job_of(0, 1, success_policy=SuccessPolicy.ANY)
    ended(job, 0)
    assert (finished(job, 0), finished(job, 1)) == ([1], [1])


def test_joining_nodes_wait_for_the_end_of_a_stage_that_has_begun_to_end() -> None:
    job = job_of(0, 1, target=3)
    ended(job, 0)
    job.operator_view(*pods(0, 1, 2), target=3)
    job.announce(2)
    job.advance(100)
    assert not job.sent_end(0)
    ended(job, 1)
    assert job.sent_end(0, 1)
    assert finished(job, 0) == [1]


@pytest.mark.parametrize("known", [0, 1], ids=["nobody was told", "one node was told"])
def test_a_new_store_decides_again(known: int) -> None:
    start = [replace(job_of(0, 1).start_of(index)) for index in (0, 1)]
    job = Job(store=1, recovering=True)
    for index in (0, 1):
        last = LastMembership(start[index], MemberState.RUNNING, ended_stage=1)
        message = replace(announcement(index, last), finished_stages=known if index == 0 else 0)
        job.decide(AgentMessage(message.agent_id, message))
    assert job.members == ["j-0-0", "j-1-0"]
    assert (finished(job, 0), finished(job, 1)) == ([1], [1])
    assert job.state.finished_stages == 1


def test_a_new_store_hears_of_an_end_while_it_recovers() -> None:
    start = [job_of(0, 1).start_of(index) for index in (0, 1)]
    job = Job(store=1, recovering=True)
    job.announce(0, membership=LastMembership(start[0], MemberState.RUNNING))
    job.send(0, StageEnded(start[0].round, 1))
    job.announce(1, membership=LastMembership(start[1], MemberState.RUNNING, ended_stage=1))
    assert (finished(job, 0), finished(job, 1)) == ([1], [1])


def test_a_standby_store_keeps_what_a_node_announced_that_has_left_it() -> None:
    start = [job_of(0, 1).start_of(index) for index in (0, 1)]
    state = initial_state(SETTINGS, attempt=1, store=1, now=0.0, standby=True)
    message = replace(announcement(2), finished_stages=2)
    for event in (AgentMessage(message.agent_id, message), AgentDisconnected(message.agent_id)):
        state = rounds.decide(state, event, 1.0).state
    job = Job()
    job.state = state
    job.operator_view(*pods(0, 1))
    for index in (0, 1):
        job.announce(index, membership=LastMembership(start[index], MemberState.RUNNING))
    assert StoreActive() in job.sent[agent_id(0)]
    assert finished(job, 0) == [2]


def test_reports_of_other_rounds_and_of_no_members_are_ignored() -> None:
    job = job_of(0, 1)
    older = job.start_of(0).round._replace(number=0)
    job.send(0, StageEnded(older, 1))
    ended(job, 1)
    assert job.state.finished_stages == 0
    assert not any(isinstance(m, StartRound) for m in job.sent[agent_id(2)])


def test_the_names_of_launchers_reach_every_round_and_every_store() -> None:
    job = job_of(0, 1)
    round_id = job.start_of(0).round
    job.send(0, StageBegan(round_id, 1, "a.py 1"))
    job.send(1, StageBegan(round_id, 1, "a.py 2"))
    ended(job, 0, 1)
    job.send(1, StageBegan(round_id, 2, "b.py 1"))
    replace_node(job, 1)
    assert job.start_of(1, incarnation=1).launchers == ("a.py 1", "b.py 1")
    successor = Job(store=1, recovering=True)
    message = replace(announcement(0), launchers=("a.py 1", "b.py 1"))
    successor.decide(AgentMessage(message.agent_id, message))
    assert successor.state.launchers == ("a.py 1", "b.py 1")


def test_a_failure_and_a_round_name_their_stage_from_the_second_one_on() -> None:
    job = job_of(0, 1)
    round_id = job.start_of(0).round
    for index in (0, 1):
        job.send(index, StageBegan(round_id, 1, "a.py 1"))
    assert (job.report.stage, job.report.reason) == (0, "the workers of 2 pods run")
    ended(job, 0, 1)
    assert job.report.stage == 0  # the commands run between two launchers
    job.send(0, StageBegan(round_id, 2, "b.py 1"))
    assert (job.report.stage, job.report.reason) == (2, "the workers of 2 pods run in stage 2")
    job.fail(1)
    job.stopped(0, 1)
    (end,) = job.report.ended_rounds
    assert end.failure is not None
    assert end.failure.stage == 2
    assert "failed in stage 2: ValueError" in end.message


def test_the_operator_knows_what_is_finished_when_all_agents_are_new() -> None:
    job = Job(store=1, recovering=True)
    job.operator_view(*pods(0, 1, incarnation=1))
    view = replace(job.state.operator_view, sequence=9, finished_stages=1, launchers=("a.py 1",))
    job.decide(OperatorViewReceived(view))
    job.announce(0, 1, incarnation=1)
    job.advance(60)
    start = job.start_of(0, incarnation=1)
    assert (start.finished_stages, start.launchers) == (1, ("a.py 1",))


def test_names_of_launchers_are_kept_up_to_a_limit() -> None:
    job = job_of(0, 1)
    for stage in range(1, MAX_LAUNCHERS + 3):
        job.send(0, StageBegan(job.start_of(0).round, stage, f"{stage}.py"))
    assert len(job.state.launchers) == MAX_LAUNCHERS
