"""When agents may break the collectives of a round that ends."""

from __future__ import annotations

from elasticjob._runtime.contract.messages import BreakRound, LastMembership, MemberState, NodeResultsEnded, RoundPhase
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.state import BREAK_TIMEOUT
from support.rendezvous.rounds import Job, agent_id, job_of


def end_results(job: Job, round_id: RoundId, *indices: int) -> None:
    for index in indices:
        job.send(index, NodeResultsEnded(round_id))


def answers(job: Job) -> dict[int, list[BreakRound]]:
    """Return what each of the agents was sent about the break."""
    found = {i: [m for m in job.sent[agent_id(i)] if isinstance(m, BreakRound)] for i in range(4)}
    return {index: messages for index, messages in found.items() if messages}


def failed(*indices: int) -> tuple[Job, RoundId]:
    """Return a job whose round ends because the worker of agent 1 has failed, and that round."""
    job = job_of(*indices)
    round_id = job.start_of(indices[0]).round
    job.fail(1)
    return job, round_id


def test_no_node_breaks_its_collectives_before_all_count_no_step() -> None:
    job, round_id = failed(0, 1, 2)
    end_results(job, round_id, 0, 1)
    assert not answers(job)
    end_results(job, round_id, 2)
    assert answers(job) == {i: [BreakRound(round_id)] for i in range(3)}
    for index in range(3):
        job.stopped(index)
    assert job.start_of(0).round > round_id


def test_members_whose_workers_have_stopped_and_lost_ones_are_not_waited_for() -> None:
    job, round_id = failed(0, 1, 2)
    end_results(job, round_id, 0)
    job.stopped(1)
    assert not answers(job)
    job.disconnect(2)
    assert not answers(job), "it may come back in a moment"
    job.advance(1)
    assert answers(job) == {0: [BreakRound(round_id)]}


def test_a_node_that_was_lost_does_not_use_its_state() -> None:
    job, round_id = failed(0, 1, 2)
    job.disconnect(2)
    job.advance(1)
    end_results(job, round_id, 0, 1)
    job.announce(2, membership=LastMembership(job.start_of(2), MemberState.RUNNING))
    end_results(job, round_id, 2)
    assert answers(job) == {0: [BreakRound(round_id)], 1: [BreakRound(round_id)], 2: [BreakRound(round_id, True)]}


def test_a_node_that_was_lost_after_it_had_said_so_keeps_its_state() -> None:
    job, round_id = failed(0, 1)
    end_results(job, round_id, 0)
    job.disconnect(0)
    job.advance(1)
    job.announce(0, membership=LastMembership(job.start_of(0), MemberState.RUNNING, results_ended=True))
    assert not answers(job), "the other one counts steps"
    job.stopped(1)
    assert answers(job) == {0: [BreakRound(round_id)]}


def test_a_member_that_does_not_answer_is_lost_and_not_those_that_wait() -> None:
    job, round_id = failed(0, 1, 2)
    end_results(job, round_id, 0, 1)
    job.advance(job.state.settings.stop_grace + BREAK_TIMEOUT)
    assert answers(job) == {i: [BreakRound(round_id)] for i in range(2)}
    job.stopped(0, 1)
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_node_that_has_reconnected_gets_its_answer() -> None:
    job, round_id = failed(0, 1)
    end_results(job, round_id, 0, 1)
    job.disconnect(0)
    job.announce(0, membership=LastMembership(job.start_of(0), MemberState.RUNNING))
    end_results(job, round_id, 0)
    job.stopped(1)
    assert answers(job)[0] == [BreakRound(round_id)] * 2


def test_a_successor_store_ends_the_round_of_nodes_that_count_no_step() -> None:
    before, round_id = failed(0, 1)
    job = Job(store=1, recovering=True)
    for index in range(2):
        member = LastMembership(before.start_of(index), MemberState.RUNNING, results_ended=True)
        job.sent[agent_id(index)].clear()
        job.announce(index, membership=member)
    assert answers(job) == {i: [BreakRound(round_id)] for i in range(2)}
    assert job.report.phase is RoundPhase.ENDING


def test_one_node_that_counts_no_step_ends_the_round_of_the_others() -> None:
    job = job_of(0, 1)
    round_id = job.start_of(0).round
    end_results(job, round_id, 0)
    assert job.report.phase is RoundPhase.ENDING
    assert not answers(job)
