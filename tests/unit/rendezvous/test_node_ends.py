"""Ends of Nodes that the operator announces with a time: which agents are sent what is left, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import (
    EndingPod,
    LastMembership,
    MachineEnd,
    OperatorView,
    PlanEnd,
    PodState,
    StandbyStore,
    StoreActive,
)
from elasticjob._runtime.rendezvous.node_ends import EARLIER_SECONDS
from elasticjob._runtime.rendezvous.state import AgentDisconnected, AgentMessage, OperatorViewReceived, initial_state
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, job_of, membership_of, pods

CLOCK = 5_000_000.0
"""The operator's clock when the job's clock shows 0."""


def announce_ends(job: Job, seconds: dict[str, float] | None) -> None:
    """Send the last view with the seconds until the Nodes of some pods end; None: the operator sees no Nodes."""
    job.sequence += 1
    now = CLOCK + job.now
    ends = None if seconds is None else tuple(EndingPod(pod, now + left) for pod, left in seconds.items())
    view = replace(job.state.operator_view, lease=1, sequence=job.sequence, sent_at=now)
    job.decide(OperatorViewReceived(replace(view, ending_pods=ends)))


def membership(job: Job, index: int) -> LastMembership:
    """Return the part of an agent in the running round, as the agent announces it."""
    assert job.state.round is not None
    return membership_of(job.state.round.members[agent_id(index)].assignment)


def ends_sent(job: Job, index: int) -> list[float | None]:
    """Return what the agent was sent since the last call: the seconds until its Node ends."""
    sent = job.sent[agent_id(index)]
    found = [m.seconds for m in sent if isinstance(m, MachineEnd)]
    sent.clear()
    return found


def test_a_node_gets_the_seconds_by_its_coordinators_clock_and_what_is_left_when_it_connects_again() -> None:
    job = job_of(0, 1)
    announce_ends(job, {"j-1-0": 120.0})
    assert (ends_sent(job, 0), ends_sent(job, 1)) == ([], [120.0])
    job.now += 20.0
    for index in (0, 1):
        job.decide(AgentDisconnected(agent_id(index)))
        job.decide(AgentMessage(agent_id(index), announcement(index, membership(job, index))))
    assert (ends_sent(job, 0), ends_sent(job, 1)) == ([], [100.0])
    job.now += 200.0
    job.decide(AgentMessage(agent_id(1), announcement(1, membership(job, 1))))
    assert ends_sent(job, 1) == [0.0]


@pytest.mark.parametrize(
    ("seconds", "sent"),
    [
        ({"j-0-0": 100.0}, []),
        ({"j-0-0": 100.0 - EARLIER_SECONDS / 2}, []),
        ({"j-0-0": 300.0}, []),
        ({"j-0-0": 40.0}, [40.0]),
        ({}, [None]),
        ({"j-1-0": 100.0}, [None]),
    ],
    ids=["the same", "a message of another delay", "later", "earlier", "withdrawn", "only of another"],
)
def test_a_known_end_only_becomes_earlier_until_it_is_withdrawn(
    seconds: dict[str, float], sent: list[float | None]
) -> None:
    job = job_of(0, 1)
    announce_ends(job, {"j-0-0": 100.0})
    assert ends_sent(job, 0) == [100.0]
    announce_ends(job, seconds)
    assert ends_sent(job, 0) == sent


def test_an_operator_that_sees_no_nodes_changes_nothing() -> None:
    job = job_of(0, 1)
    announce_ends(job, {"j-0-0": 100.0})
    job.operator_view(*pods(0, 1))
    announce_ends(job, None)
    assert ends_sent(job, 0) == [100.0]
    assert job.state.node_ends == {"j-0-0": job.now + 100.0}


def test_a_view_that_is_not_newer_changes_nothing() -> None:
    job = job_of(0, 1)
    announce_ends(job, {"j-0-0": 100.0})
    stale = replace(job.state.operator_view, ending_pods=())
    job.decide(OperatorViewReceived(stale))
    assert ends_sent(job, 0) == [100.0]


def test_a_node_knows_the_end_before_the_planned_end_begins() -> None:
    job = job_of(0, 1)
    leaving = replace(pods(0)[0], state=PodState.DRAINING)
    view = replace(job.state.operator_view, sequence=job.sequence + 1, pods=(leaving, *pods(1)))
    job.sent.clear()
    job.decide(OperatorViewReceived(replace(view, sent_at=CLOCK, ending_pods=(EndingPod("j-0-0", CLOCK + 30.0),))))
    assert [type(m) for m in job.sent[agent_id(0)]] == [MachineEnd, PlanEnd]
    assert [type(m) for m in job.sent[agent_id(1)]] == [PlanEnd]


def test_a_standby_store_sends_what_it_knows_once_it_has_taken_over() -> None:
    before = job_of(0, 1)
    job = Job(store=1)
    job.state = initial_state(SETTINGS, attempt=1, store=1, now=job.now, standby=True)
    view = OperatorView(1, 1, SETTINGS, 0, None, pods(0, 1), serving=0, standby_store=StandbyStore(1, "", 0))
    view = replace(view, sent_at=CLOCK, ending_pods=(EndingPod("j-0-0", CLOCK + 30.0),))
    job.decide(OperatorViewReceived(view))
    job.now += 10.0
    for index in (0, 1):
        job.decide(AgentMessage(agent_id(index), announcement(index, membership(before, index))))
    first = job.sent[agent_id(0)]
    assert isinstance(first[0], StoreActive)
    assert [m for m in first if isinstance(m, MachineEnd)] == [MachineEnd(20.0)]
    assert not any(isinstance(m, MachineEnd) for m in job.sent[agent_id(1)])


@pytest.mark.parametrize(
    ("seconds", "sent"), [({}, [None]), (None, [])], ids=["withdrawn", "the operator sees no Nodes"]
)
def test_a_node_that_had_no_link_learns_that_the_end_was_withdrawn(
    seconds: dict[str, float] | None, sent: list[float | None]
) -> None:
    job = job_of(0, 1)
    announce_ends(job, {"j-1-0": 120.0})
    ends_sent(job, 1)
    job.decide(AgentDisconnected(agent_id(1)))
    job.state = replace(job.state, operator_view=replace(job.state.operator_view, ending_pods=None), node_ends={})
    announce_ends(job, seconds)
    for knows in (False, True):
        announced = replace(announcement(1, membership(job, 1)), knows_machine_end=knows)
        job.decide(AgentMessage(agent_id(1), announced))
        assert ends_sent(job, 1) == (sent if knows else [])
