"""Which agents are in a round, which are standbys, and what a closed rendezvous means."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    ANY_INDEX,
    Announce,
    Close,
    Closed,
    EndReason,
    Outcome,
    PodState,
    Ready,
    RoundPhase,
    Standby,
    StartRound,
)
from elasticjob._runtime.contract.names import PRESTART_ROUND
from elasticjob._runtime.rendezvous.state import AgentDisconnected, AgentMessage
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, pods


def job_of(*indices: int, target: int) -> Job:
    """A job with a running round of these indices, and without an operator."""
    job = Job(replace(SETTINGS, max_nodes=target, target=target))
    job.running(*indices)
    return job


def test_a_spare_is_swapped_in_without_a_second_round() -> None:
    job = Job(replace(SETTINGS, max_nodes=3, target=3))
    job.announce(0, 1, 2)
    job.started(0, 1, 2)
    job.announce(3)
    assert job.last(3) == Standby("the round is full without this pod", redundant=True)
    job.disconnect(1)
    job.advance(1)
    job.stopped(0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]
    job.started(0, 2, 3)
    job.announce(1, incarnation=1)
    job.advance(60)
    assert (job.phase(), job.report.rounds) == (RoundPhase.RUNNING, 2)
    assert job.last(1, incarnation=1) == Standby("the round is full without this pod", redundant=True)


SPARED = replace(SETTINGS, min_nodes=2, max_nodes=3, target=3, spares=1)


def spared(*connected: int) -> Job:
    """A job of three agents and a spare, with an operator; a round of the first three connected agents runs."""
    job = Job(SPARED)
    job.operator_view(*pods(0, 1, 2, 3))
    job.announce(*connected)
    job.started(*connected[:3])
    return job


def lose(job: Job, index: int, *survivors: int) -> None:
    job.disconnect(index)
    job.advance(1)
    job.stopped(*survivors)


def test_a_round_starts_without_spares_or_with_one_if_a_pod_is_unschedulable() -> None:
    assert spared(0, 1, 2).members == ["j-0-0", "j-1-0", "j-2-0"]
    job = Job(SPARED)
    job.operator_view(*pods(0, 1), *pods(2, state=PodState.UNSCHEDULABLE), *pods(3, state=PodState.STARTING))
    job.announce(0, 1)
    assert job.members == []
    job.announce(3)
    assert job.members == ["j-0-0", "j-1-0", "j-3-0"]


def test_a_spare_keeps_its_place_and_the_replacement_pod_becomes_standby() -> None:
    job = spared(0, 1, 2, 3)
    assert job.last(3) == Standby("the round is full without this pod", redundant=True)
    lose(job, 1, 0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]
    job.started(0, 2, 3)
    job.operator_view(*pods(0, 2, 3), *pods(1, incarnation=1))
    job.announce(1, incarnation=1)
    job.advance(60)
    assert job.last(1, incarnation=1) == Standby("the round is full without this pod", redundant=True)
    assert (job.phase(), job.report.rounds) == (RoundPhase.RUNNING, 2)
    job.fail(0)
    job.stopped(0, 2, 3)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]


def test_a_spare_that_becomes_ready_after_a_node_was_lost_joins_at_once() -> None:
    job = spared(0, 1, 2)
    job.announce(3, ready=False)
    lose(job, 1, 0, 2)
    assert job.members == ["j-0-0", "j-2-0"]
    job.started(0, 2)
    job.ready(3)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]


def test_a_spare_that_leaves_the_round_counts_as_node_left() -> None:
    job = spared(0, 1, 3, 2)
    job.leave(3)
    job.stopped(0, 1, 3)
    assert job.report.ended_rounds[-1].reason is EndReason.NODE_LEFT
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]


def test_a_lower_target_turns_a_member_into_a_spare() -> None:
    job = spared(0, 1, 2, 3)
    job.operator_view(*pods(0, 1, 2), *pods(3, state=PodState.DRAINING), target=2)
    job.stopped(0, 1, 2)
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.last(2) == Standby("the round is full without this pod", redundant=True)
    assert job.finished(3) is not None


def test_a_standby_replaces_a_member_whose_index_is_no_longer_needed() -> None:
    job = spared(0, 1, 2, 3)
    lose(job, 1, 0, 2)
    job.started(0, 2, 3)
    job.operator_view(*pods(0, 2, 3), *pods(1, incarnation=1))
    job.announce(1, incarnation=1)
    job.operator_view(*pods(0, 2), *pods(1, incarnation=1), *pods(3, state=PodState.DRAINING), spares=0)
    job.stopped(0, 2, 3)
    assert job.members == ["j-0-0", "j-2-0", "j-1-1"]
    ended = job.report.ended_rounds[-1]
    assert (ended.reason, ended.message) == (EndReason.SCALING_DOWN, "no longer needed: j-3-0")


def test_a_node_without_a_place_becomes_a_redundant_standby() -> None:
    job = Job(replace(SETTINGS, min_nodes=1, max_nodes=1, target=1))
    job.announce(1)
    job.announce(0)
    assert job.last(0) == Standby("the round is full without this pod", redundant=True)


def test_lost_nodes_that_wait_or_stand_by_are_in_no_round() -> None:
    job = Job(replace(SETTINGS, min_nodes=1, max_nodes=1, target=1))
    job.announce(0, 1)
    for index in (1, 0):  # the standby, then the member
        job.disconnect(index)
    job.advance(1)
    assert job.state.round is None
    waiting = Job()
    waiting.announce(0)
    waiting.disconnect(0)
    waiting.advance(1)
    waiting.announce(1)
    waiting.advance(waiting.state.settings.last_call_timeout)
    assert waiting.state.round is None


def test_joining_nodes_do_not_wait_once_they_fill_the_round() -> None:
    job = job_of(0, 1, target=3)
    job.announce(2)
    assert job.phase() is RoundPhase.ENDING


def test_roles_have_ranks_of_their_own_among_heterogeneous_nodes() -> None:
    job = Job(replace(SETTINGS, target=3, max_nodes=3))
    for index, role, workers in ((0, "trainer", 2), (1, "reader", 1), (2, "trainer", 3)):
        announce = Announce(index, 0, agent_id(index), f"j-{index}-0", "10.0.0.1", 5000, workers, role=role)
        job.decide(AgentMessage(agent_id(index), announce))
    starts = [job.start_of(index) for index in range(3)]
    assert [(s.rank, s.world_size) for s in starts] == [(0, 6), (2, 6), (3, 6)]
    assert [(s.role_rank, s.role_world_size) for s in starts] == [(0, 5), (0, 1), (2, 5)]


def test_a_node_whose_index_another_agent_takes_gets_finish() -> None:
    job = spared(0, 1, 2, 3)
    job.announce(3, incarnation=1)  # of a standby
    job.announce(1, incarnation=1)  # of a member, which first stops
    assert job.finished(1) is None
    assert job.sent_end(0, 1, 2)
    job.stopped(0, 1, 2)
    for displaced, why in ((3, "another agent has announced itself with index 3"), (1, "a newer pod has its index")):
        finish = job.finished(displaced)
        assert finish is not None
        assert (finish.outcome, finish.reason, finish.message) == (Outcome.SUPERSEDED, "Superseded", why)


def test_a_displaced_node_that_is_disconnected_gets_finish_when_it_reconnects() -> None:
    job = spared(0, 1, 2, 3)
    job.disconnect(3)
    job.announce(3, incarnation=1)
    assert job.finished(3) is None
    job.announce(3)
    assert job.finished(3) is not None


# ---- without an operator, under a stock torchrun: agents without an index, and torch's `set_closed`


def announce_any_index(job: Job, name: str) -> str:
    job.decide(AgentMessage(name, Announce(ANY_INDEX, 0, name, name, "10.0.0.1", 5000, 1, ready=True)))
    return name


def test_a_node_without_an_index_gets_the_lowest_free_one_and_keeps_it() -> None:
    job = Job(replace(SETTINGS, min_nodes=1, max_nodes=2, target=2))
    one, two = announce_any_index(job, "one"), announce_any_index(job, "two")
    announce_any_index(job, one)
    assert {n.agent_id: n.index for n in job.state.agents.values()} == {one: 0, two: 1}
    job.decide(AgentDisconnected(one))
    job.advance(1)
    announce_any_index(job, "three")
    assert {n.agent_id: n.index for n in job.state.agents.values()} == {two: 1, "three": 0}


def test_closed_stays_closed_and_lets_the_running_round_go_on() -> None:
    job = job_of(0, 1, target=3)
    job.send(1, Close("done"))
    job.send(0, Close("a second time"))
    assert [job.last(index) for index in (0, 1)] == [Closed("done"), Closed("done")]
    assert job.phase() is RoundPhase.RUNNING
    job.announce(2)
    finish = job.finished(2)
    assert finish is not None
    assert (finish.outcome, finish.reason, finish.message) == (Outcome.LEFT, "RendezvousClosed", "done")
    job.fail(0)
    job.stopped(0, 1)
    assert [f.reason for f in (job.finished(0), job.finished(1)) if f] == ["RendezvousClosed"] * 2
    assert job.report.reason == "rendezvous closed: done"


def test_a_node_cannot_close_a_job_that_has_an_operator() -> None:
    job = job_of(0, 1, target=2)
    job.operator_view(*pods(0, 1))
    job.send(1, Close("done"))
    job.fail(0)
    job.stopped(0, 1)
    assert job.start_of(1).round.number == 2


def provisional(job: Job, index: int) -> StartRound | None:
    message = job.last(index)
    assert isinstance(message, Standby)
    return message.provisional


def test_a_node_outside_learns_its_ranks_once_the_function_can_be_called_again() -> None:
    """It would be the last agent. A store that takes over knows it from what the agent of rank 0 announces."""
    job = job_of(0, 1, target=2)
    job.announce(3)
    assert provisional(job, 3) is None
    sent = len(job.sent["0.0"])
    job.send(0, Ready(restartable=True))
    expected = job.start_of(1)
    expected = replace(expected, round=PRESTART_ROUND, group_rank=2, group_world_size=3, rank=2, world_size=3)
    expected = replace(expected, role_rank=2, role_world_size=3, master_addr="", master_port=0)
    assert provisional(job, 3) == expected
    assert len(job.sent["0.0"]) == sent, "members get no such message"
    sent = len(job.sent["3.0"])
    job.send(0, Ready("no fork", restartable=True))
    assert len(job.sent["3.0"]) == sent, "it is sent once"
    job.announce(4)
    assert provisional(job, 4) == expected


def test_ranks_of_a_role_count_its_own_workers() -> None:
    job = job_of(0, 1, target=2)
    job.send(0, Ready(restartable=True))
    job.decide(AgentMessage("3.0", replace(announcement(3), role="other", local_world_size=4)))
    start = provisional(job, 3)
    assert start is not None
    assert (start.rank, start.world_size, start.role_rank, start.role_world_size) == (2, 6, 0, 4)


def test_the_node_that_hosts_the_rounds_store_gets_the_address_of_every_node() -> None:
    job = Job(replace(SETTINGS, max_nodes=3, target=3))
    job.announce(2, 0)
    beside = replace(announcement(1), address=announcement(0).address, store_port=7)
    job.decide(AgentMessage(agent_id(1), beside))
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]
    starts = [job.last(index) for index in (0, 1, 2)]
    assert [s.member_addresses for s in starts if isinstance(s, StartRound)] == [("10.0.0.0", "10.0.0.2"), (), ()]
