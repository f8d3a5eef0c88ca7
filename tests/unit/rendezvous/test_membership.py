"""Who is in a round, who stands by, and what is closed. `Job` is the driver of test_rounds.py."""

from __future__ import annotations

from dataclasses import replace

from elasticjob.contract.messages import (
    ANY_INDEX,
    Announce,
    Close,
    Closed,
    EndReason,
    Outcome,
    PodState,
    RoundPhase,
    Standby,
)
from elasticjob.rendezvous.state import NodeDisconnected, NodeMessage
from support.rounds import SETTINGS, Job, agent_id, pods


def job_of(*indices: int, target: int) -> Job:
    """A round of these indices runs, and no operator has spoken."""
    job = Job(replace(SETTINGS, max_nodes=target, target=target))
    job.running(*indices)
    return job


def test_a_spare_is_swapped_in_without_a_second_round() -> None:
    job = Job(replace(SETTINGS, max_nodes=3, target=3))
    job.announce(0, 1, 2)
    job.started(0, 1, 2)
    job.announce(3)
    assert job.last(3) == Standby("the round is full without this node", redundant=True)
    job.gone(1)
    job.later(1)
    job.stopped(0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]
    job.started(0, 2, 3)
    job.announce(1, inc=1)
    job.later(60)
    assert (job.phase(), job.report.rounds) == (RoundPhase.RUNNING, 2)
    assert job.last(1, inc=1) == Standby("the round is full without this node", redundant=True)


SPARED = replace(SETTINGS, min_nodes=2, max_nodes=3, target=3, spares=1)


def spared(*here: int) -> Job:
    """An operator keeps three nodes and a spare; a round of the first three of those that are here runs."""
    job = Job(SPARED)
    job.facts(*pods(0, 1, 2, 3))
    job.announce(*here)
    job.started(*here[:3])
    return job


def lose(job: Job, index: int, *stay: int) -> None:
    job.gone(index)
    job.later(1)
    job.stopped(*stay)


def test_a_round_begins_without_its_spares_and_with_one_where_a_node_finds_no_place() -> None:
    assert spared(0, 1, 2).members == ["j-0-0", "j-1-0", "j-2-0"]
    job = Job(SPARED)
    job.facts(*pods(0, 1), *pods(2, state=PodState.UNSCHEDULABLE), *pods(3, state=PodState.STARTING))
    job.announce(0, 1)
    assert job.members == []
    job.announce(3)
    assert job.members == ["j-0-0", "j-1-0", "j-3-0"]


def test_a_spare_keeps_the_place_it_took_and_who_comes_back_stands_by() -> None:
    job = spared(0, 1, 2, 3)
    assert job.last(3) == Standby("the round is full without this node", redundant=True)
    lose(job, 1, 0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]
    job.started(0, 2, 3)
    job.facts(*pods(0, 2, 3), *pods(1, inc=1))
    job.announce(1, inc=1)
    job.later(60)
    assert job.last(1, inc=1) == Standby("the round is full without this node", redundant=True)
    assert (job.phase(), job.report.rounds) == (RoundPhase.RUNNING, 2)
    job.fail(0)
    job.stopped(0, 2, 3)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]


def test_a_spare_that_is_not_ready_when_a_node_is_lost_joins_at_once_when_it_is() -> None:
    job = spared(0, 1, 2)
    job.announce(3, ready=False)
    lose(job, 1, 0, 2)
    assert job.members == ["j-0-0", "j-2-0"]
    job.started(0, 2)
    job.ready(3)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]


def test_a_spare_that_trains_and_is_told_to_go_has_left() -> None:
    job = spared(0, 1, 3, 2)
    job.leave(3)
    job.stopped(0, 1, 3)
    assert job.report.ended_rounds[-1].reason is EndReason.NODE_LEFT
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]


def test_a_lower_target_keeps_a_spare_of_those_that_are_there() -> None:
    job = spared(0, 1, 2, 3)
    job.facts(*pods(0, 1, 2), *pods(3, state=PodState.DRAINING), target=2)
    job.stopped(0, 1, 2)
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.last(2) == Standby("the round is full without this node", redundant=True)
    assert job.finished(3) is not None


def test_a_spare_takes_the_place_of_a_member_that_is_one_too_many() -> None:
    job = spared(0, 1, 2, 3)
    lose(job, 1, 0, 2)
    job.started(0, 2, 3)
    job.facts(*pods(0, 2, 3), *pods(1, inc=1))
    job.announce(1, inc=1)
    job.facts(*pods(0, 2), *pods(1, inc=1), *pods(3, state=PodState.DRAINING), spares=0)
    job.stopped(0, 2, 3)
    assert job.members == ["j-0-0", "j-2-0", "j-1-1"]
    ended = job.report.ended_rounds[-1]
    assert (ended.reason, ended.message) == (EndReason.SCALING_DOWN, "j-3-0 is not wanted any more")


def test_who_is_left_out_of_a_round_is_told_that_it_is_full() -> None:
    job = Job(replace(SETTINGS, min_nodes=1, max_nodes=1, target=1))
    job.announce(1)
    job.announce(0)
    assert job.last(0) == Standby("the round is full without this node", redundant=True)


def test_the_window_ends_at_once_when_the_round_is_full() -> None:
    job = job_of(0, 1, target=3)
    job.announce(2)
    assert job.phase() is RoundPhase.ENDING


def test_roles_have_ranks_of_their_own_among_heterogeneous_nodes() -> None:
    job = Job(replace(SETTINGS, target=3, max_nodes=3))
    for index, role, workers in ((0, "trainer", 2), (1, "reader", 1), (2, "trainer", 3)):
        announce = Announce(index, 0, agent_id(index), f"j-{index}-0", "10.0.0.1", 5000, workers, role=role)
        job.decide(NodeMessage(agent_id(index), announce))
    starts = [job.start_of(index) for index in range(3)]
    assert [(s.rank, s.world_size) for s in starts] == [(0, 6), (2, 6), (3, 6)]
    assert [(s.role_rank, s.role_world_size) for s in starts] == [(0, 5), (0, 1), (2, 5)]


# ---- nodes that no operator numbers or ends: under a stock torchrun


def any_slot(job: Job, name: str) -> str:
    job.decide(NodeMessage(name, Announce(ANY_INDEX, 0, name, name, "10.0.0.1", 5000, 1, ready=True)))
    return name


def test_a_node_without_a_slot_gets_the_lowest_free_one_and_keeps_it() -> None:
    job = Job(replace(SETTINGS, min_nodes=1, max_nodes=2, target=2))
    one, two = any_slot(job, "one"), any_slot(job, "two")
    any_slot(job, one)
    assert {n.agent_id: n.index for n in job.state.nodes.values()} == {one: 0, two: 1}
    job.decide(NodeDisconnected(one))
    job.later(1)
    any_slot(job, "three")
    assert {n.agent_id: n.index for n in job.state.nodes.values()} == {two: 1, "three": 0}


def test_closed_stays_closed_and_lets_the_running_round_go_on() -> None:
    job = job_of(0, 1, target=3)
    job.say(1, Close("done"))
    job.say(0, Close("said again"))
    assert [job.last(index) for index in (0, 1)] == [Closed("done"), Closed("done")]
    assert job.phase() is RoundPhase.RUNNING
    job.announce(2)
    finish = job.finished(2)
    assert finish is not None
    assert (finish.outcome, finish.reason, finish.message) == (Outcome.LEFT, "RendezvousClosed", "done")
    job.fail(0)
    job.stopped(0, 1)
    assert [f.reason for f in (job.finished(0), job.finished(1)) if f] == ["RendezvousClosed"] * 2
    assert job.report.reason == "closed: done"


def test_a_node_cannot_close_what_an_operator_runs() -> None:
    job = job_of(0, 1, target=2)
    job.facts(*pods(0, 1))
    job.say(1, Close("done"))
    job.fail(0)
    job.stopped(0, 1)
    assert job.start_of(1).round.number == 2
