"""When the others go on without an agent that has to start a process, and when they wait for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import (
    EndReason,
    LastMembership,
    MemberState,
    NewProcesses,
    Ready,
    RoundPhase,
    Standby,
    WorkersStopped,
)
from elasticjob._runtime.rendezvous.state import AgentMessage
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, job_of, pods

START, FORM = 3.0, 0.05


def stopped(job: Job, index: int, count: int = 0, start: float | None = START, form: float | None = FORM) -> None:
    new = NewProcesses(count, start, form, keeps_newest_state=True)
    job.send(index, WorkersStopped(job.start_of(index).round, 6000 + index, new_processes=new))


def restartable(*indices: int, **settings: Any) -> Job:
    """A job with a running round of these agents, whose function can be called again."""
    job = job_of(*indices, **settings)
    job.send(indices[0], Ready(restartable=True))
    return job


def kill(job: Job, *killed: int, start: float | None = START, form: float | None = FORM, stop: float = 0.01) -> None:
    """End the processes of these agents; the others stay."""
    running = [n.index for n in job.state.agents.values() if n.pod in job.members]
    job.fail(killed[0])
    job.now += stop
    for index in running:
        stopped(job, index, int(index in killed), start, form)


def test_the_others_go_on_without_a_node_whose_start_is_known_to_be_long() -> None:
    job = restartable(0, 1, 2)
    kill(job, 1)
    assert job.members == ["j-0-0", "j-2-0"]
    waiting = job.last(1)
    assert isinstance(waiting, Standby)
    assert waiting.provisional is not None
    assert (waiting.provisional.rank, waiting.provisional.world_size) == (2, 3)
    assert [e.charged for e in job.report.ended_rounds] == [True]


def test_the_node_joins_once_its_process_waits_and_nothing_more_is_charged() -> None:
    job = restartable(0, 1, 2)
    kill(job, 1)
    job.started(0, 2)
    job.advance(60)
    assert job.phase() is RoundPhase.RUNNING, "it is not ready"
    job.ready(1)
    assert job.phase() is RoundPhase.ENDING
    for index in (0, 2):
        stopped(job, index)
    assert job.members == ["j-0-0", "j-2-0", "j-1-0"]
    assert [(e.reason, e.charged) for e in job.report.ended_rounds] == [
        (EndReason.WORKER_FAILED, True),
        (EndReason.SCALING_UP, False),
    ]


@pytest.mark.parametrize(
    ("case", "start", "form"),
    [
        ("a start of the length of a pause", 0.12, 0.05),
        ("a start that is unknown", None, 0.05),
        ("a pause that is unknown", 3.0, None),
        ("a long pause", 3.0, 2.0),
    ],
)
def test_the_others_wait_as_before(case: str, start: float | None, form: float | None) -> None:
    job = restartable(0, 1, 2)
    kill(job, 1, start=start, form=form)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"], case


@pytest.mark.parametrize("stop", [0.01, 5.0])
def test_the_time_to_stop_is_part_of_the_pause(stop: float) -> None:
    job = restartable(0, 1, 2)
    kill(job, 1, stop=stop)
    assert len(job.members) == (2 if stop < 1 else 3)
    if stop < 1:  # what the shortest of all stops took is known
        job.started(0, 2)
        job.ready(1)
        for index in (0, 2):
            stopped(job, index)
        job.started(0, 1, 2)
        kill(job, 2, stop=5.0)
        assert job.members == ["j-0-0", "j-1-0"]


def test_the_others_wait_if_the_function_cannot_be_called_again() -> None:
    job = job_of(0, 1, 2)
    kill(job, 1)
    assert len(job.members) == 3


def test_the_others_wait_if_they_are_fewer_than_minreplicas() -> None:
    assert [len(_killed_of(3, low, 1)) for low in (3, 2)] == [3, 2]
    assert len(_killed_of(3, 2, 2)) == 3


def _killed_of(nodes: int, low: int, killed: int) -> list[str]:
    job = restartable(*range(nodes), min_nodes=low)
    kill(job, *range(1, killed + 1))
    return job.members


def test_only_sizes_on_the_step_are_formed_and_all_ranks_that_miss_are_counted() -> None:
    """Of four agents, two go on and two are idle for the start: 8 seconds of ranks and a join, not 12."""
    job = restartable(0, 1, 2, 3, min_nodes=2, increment=2)
    kill(job, 3)
    assert job.members == ["j-0-0", "j-1-0"]
    job = restartable(0, 1, 2, 3, min_nodes=2, increment=2)
    kill(job, 3, form=0.8)  # 12 of waiting, 6.5 of a join and 6 of idle ranks
    assert len(job.members) == 4


@pytest.mark.parametrize(("form", "members"), [(0.5, 2), (1.1, 3)])
def test_the_other_ranks_of_its_pod_count_as_idle(form: float, members: int) -> None:
    """Three agents of eight workers: 24 ranks wait for 3 s, or 8 of them are idle for 3 s and 24 pause once more."""
    job = Job(replace(SETTINGS, target=3))
    job.operator_view(*pods(0, 1, 2))
    job.announce(0, 1, 2, workers=8)
    job.started(0, 1, 2)
    job.send(0, Ready(restartable=True))
    kill(job, 1, form=form)
    assert len(job.members) == members


def test_the_rank_that_came_last_says_what_forming_takes_and_each_node_what_its_start_takes() -> None:
    job = restartable(0, 1, 2)
    job.fail(1)
    stopped(job, 0, start=0.1, form=3.2)
    stopped(job, 2, start=0.1, form=3.2)
    stopped(job, 1, 1, start=3.0, form=0.05)
    assert job.members == ["j-0-0", "j-2-0"]
    job = restartable(0, 1, 2)
    job.fail(1)
    stopped(job, 0, start=3.0)
    stopped(job, 2, start=3.0)
    stopped(job, 1, 1, start=0.1)
    assert len(job.members) == 3, "its own start is short"
    job = restartable(0, 1, 2)
    job.fail(1)
    stopped(job, 0, start=3.0)
    stopped(job, 2, start=9.0)
    stopped(job, 1, 1, start=None)
    assert job.members == ["j-0-0", "j-2-0"], "it is as fast as the fastest of the others"


def test_the_others_wait_once_a_node_knows_that_the_script_needs_its_round_before_the_function() -> None:
    job = restartable(0, 1, 2)
    job.fail(1)
    stopped(job, 0)
    job.send(2, WorkersStopped(job.start_of(2).round, 6002, new_processes=NewProcesses(0, START, FORM, False)))
    stopped(job, 1, 1)
    assert len(job.members) == 3


def test_a_second_report_of_the_stop_changes_nothing() -> None:
    """An agent that has stopped answers the end of the round as well."""
    job = restartable(0, 1, 2)
    kill(job, 1)
    sent = len(job.sent[agent_id(1)])
    stopped(job, 1, 1)
    assert len(job.sent[agent_id(1)]) == sent
    job.started(0, 2)
    job.ready(1)
    for index in (0, 2):
        stopped(job, index)
    assert len(job.members) == 3


def test_a_node_of_rank_0_is_left_out_too() -> None:
    """It is the one that knows that the function can be called again."""
    job = restartable(0, 1, 2)
    kill(job, 0)
    assert job.members == ["j-1-0", "j-2-0"]
    assert isinstance(waiting := job.last(0), Standby)
    assert waiting.provisional is not None
    assert not job.state.agents[agent_id(0)].ready


def test_a_spare_takes_its_place() -> None:
    job = restartable(0, 1, 2, target=3)
    job.operator_view(*pods(0, 1, 2, 3), target=3, spares=1)
    job.announce(3)
    kill(job, 1)
    assert job.members == ["j-0-0", "j-2-0", "j-3-0"]
    job.started(0, 2, 3)
    job.ready(1)
    assert job.phase() is RoundPhase.RUNNING


def test_two_nodes_that_start_processes_join_together() -> None:
    job = restartable(0, 1, 2, 3)
    kill(job, 1, 3)
    assert job.members == ["j-0-0", "j-2-0"]
    job.started(0, 2)
    job.ready(1)
    assert job.phase() is RoundPhase.RUNNING, "the other one is expected"
    job.ready(3)
    assert job.phase() is RoundPhase.ENDING


def test_a_node_that_stops_an_older_round_starts_its_processes_before_it_joins() -> None:
    job = restartable(0, 1, 2)
    job.disconnect(1)
    job.advance(1)
    stopped(job, 0)
    stopped(job, 2)
    job.started(0, 2)
    old = job.start_of(1)
    job.announce(1, membership=LastMembership(old, MemberState.RUNNING))
    job.send(1, WorkersStopped(old.round, 6001, new_processes=NewProcesses(1, None, None)))
    assert isinstance(waiting := job.last(1), Standby)
    assert waiting.provisional is not None
    assert job.phase() is RoundPhase.RUNNING
    job.ready(1)
    assert job.phase() is RoundPhase.ENDING


def test_a_node_whose_link_closes_before_it_starts_its_processes_is_sent_that_again() -> None:
    job = restartable(0, 1, 2)
    kill(job, 1)
    job.started(0, 2)
    job.disconnect(1)
    last = LastMembership(job.start_of(1), MemberState.STOPPED)
    again = replace(announcement(1, last), new_processes=NewProcesses(1, START, FORM))
    job.decide(AgentMessage(agent_id(1), again))
    assert isinstance(waiting := job.last(1), Standby)
    assert waiting.provisional is not None
    assert job.phase() is RoundPhase.RUNNING


def test_the_reason_has_both_costs() -> None:
    job = restartable(0, 1, 2)
    kill(job, 1)
    assert "but j-1-0, where new processes start: that takes about 3.0 s" in job.reasons[-1]
    assert "a later join about 0.06 s" in job.reasons[-1]


@pytest.mark.parametrize(("keeps", "members"), [(True, ["j-0-0", "j-2-0"]), (False, ["j-0-0", "j-1-0", "j-2-0"])])
def test_the_others_wait_for_a_node_that_alone_may_have_the_newest_state(keeps: bool, members: list[str]) -> None:
    """None of the others had ended `State.sync`, or each has a shard."""
    job = restartable(0, 1, 2)
    job.fail(1)
    job.now += 0.01
    for index in range(3):
        new = NewProcesses(int(index == 1), START, FORM, keeps_newest_state=keeps and index == 2)
        job.send(index, WorkersStopped(job.start_of(index).round, 6000 + index, new_processes=new))
    assert job.members == members


def test_a_node_outside_the_round_that_a_new_store_finds_starts_its_processes_first() -> None:
    """It is not taken into a round before they wait at their function, so the others pause once."""
    old = restartable(0, 1, 2)
    before = old.start_of(1)
    kill(old, 1)
    assert old.members == ["j-0-0", "j-2-0"]
    old.started(0, 2)
    job = Job(old.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0, 1, 2))
    lost = NewProcesses(1, START, FORM, keeps_newest_state=True)
    stopped_before = announcement(1, LastMembership(before, MemberState.STOPPED))
    job.send(1, replace(stopped_before, new_processes=lost, restartable=True))
    for index in (0, 2):
        running = announcement(index, LastMembership(old.start_of(index), MemberState.RUNNING))
        job.send(index, replace(running, restartable=True))
    job.advance(job.state.settings.scale_up_stabilization + 1)
    assert job.members == ["j-0-0", "j-2-0"]
    assert job.phase() is RoundPhase.RUNNING, "it has not said that its processes wait"
    waiting = job.last(1)
    assert isinstance(waiting, Standby)
    assert waiting.provisional is not None
    job.send(1, Ready(restartable=True))
    assert job.phase() is RoundPhase.ENDING
