"""A rendezvous that an agent closes: who may leave without ending the round of the others, and who may ask."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Close,
    Closed,
    EndReason,
    Finish,
    MemberState,
    Outcome,
    QueryClosed,
    RoundPhase,
    Standby,
    WorkersSucceeded,
)
from elasticjob._runtime.rendezvous.state import RECONNECT_GRACE, AgentMessage
from support.rendezvous.rounds import Job, membership_of

GRACE = 2 * RECONNECT_GRACE
VISITOR = "visitor@10.0.0.9:5000"


def closed_job(*finished: int, nodes: int = 3) -> Job:
    """A running round without an operator. The `finished` agents succeed, close the rendezvous and leave."""
    job = Job()
    job.running(*range(nodes))
    for index in finished:
        job.succeed(index)
        job.send(index, Close("done"))
        job.disconnect(index)
    job.advance(GRACE)
    return job


def ask(job: Job, message: AgentToCoordinator) -> None:
    job.decide(AgentMessage(VISITOR, message))


# ---- members that have finished


def test_a_finished_member_that_leaves_after_close_does_not_end_the_round() -> None:
    job = closed_job(0, 2)
    assert job.phase() is RoundPhase.RUNNING
    assert job.last(1) == Closed("done")


def test_the_job_succeeds_once_the_last_member_has_finished_too() -> None:
    job = closed_job(0, 2)
    job.succeed(1)
    assert job.finished(1) == Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")
    assert job.state.outcome is Outcome.SUCCEEDED


def test_a_finished_member_that_leaves_an_open_rendezvous_ends_the_round() -> None:
    """The others may need it again: finished workers run again if a worker fails elsewhere."""
    job = Job()
    job.running(0, 1, 2)
    job.succeed(0)
    job.disconnect(0)
    job.advance(GRACE)
    assert job.sent_end(1, 2)


def test_a_member_that_is_lost_after_close_ends_the_round() -> None:
    job = closed_job(0)
    job.disconnect(1)
    job.advance(GRACE)
    assert job.sent_end(2)
    job.stopped(2)
    [ended] = job.report.ended_rounds
    assert (ended.reason, ended.lost_pods) == (EndReason.AGENT_LOST, ("j-1-0",))
    assert job.finished(2) == Finish(Outcome.LEFT, "RendezvousClosed", "done")


def test_the_end_of_the_round_does_not_wait_for_finished_members_that_left() -> None:
    job = closed_job(0)
    job.fail(1)
    assert job.sent_end(2)
    job.stopped(1, 2)
    [ended] = job.report.ended_rounds
    assert (ended.reason, ended.message) == (EndReason.WORKER_FAILED, "rank 1 in j-1-0 failed: ValueError")
    assert ended.lost_pods == ()


def test_a_finished_member_that_leaves_while_its_round_ends_counts_as_stopped() -> None:
    job = Job()
    job.running(0, 1, 2)
    job.succeed(0)
    job.send(0, Close("done"))
    job.fail(1)
    job.disconnect(0)
    job.stopped(1, 2)
    assert job.phase() is RoundPhase.ENDING
    job.advance(GRACE)
    [ended] = job.report.ended_rounds
    assert (ended.reason, ended.lost_pods) == (EndReason.WORKER_FAILED, ())


def test_a_finished_member_may_come_back() -> None:
    job = closed_job(0)
    job.announce(0, membership=membership_of(job.start_of(0), MemberState.SUCCEEDED))
    assert job.phase() is RoundPhase.RUNNING
    job.succeed(1, 2)
    assert all(job.finished(index) == Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded") for index in range(3))


# ---- visitors: processes that are no agent of the rendezvous


def test_a_visitor_learns_whether_the_rendezvous_is_closed() -> None:
    job = Job()
    ask(job, QueryClosed())
    job.running(0, 1)
    ask(job, QueryClosed())
    job.send(0, Close("done"))
    ask(job, QueryClosed())
    waiting, running, closed = job.sent[VISITOR]
    assert waiting == Standby("waiting for more worker pods")
    assert isinstance(running, Standby)
    assert closed == Closed("done")


def test_a_visitor_learns_that_the_job_has_ended() -> None:
    job = Job()
    job.running(0, 1)
    job.succeed(0, 1)
    ask(job, QueryClosed())
    assert job.sent[VISITOR] == [Closed("AllAgentsSucceeded")]


def test_a_visitor_closes_the_rendezvous_and_is_in_no_round() -> None:
    job = Job()
    job.running(0, 1)
    ask(job, Close("over"))
    ask(job, Close("a second time"))
    assert job.sent[VISITOR] == [Closed("over"), Closed("over")]
    assert [job.last(index) for index in (0, 1)] == [Closed("over")] * 2
    assert VISITOR not in job.state.agents
    assert job.phase() is RoundPhase.RUNNING


def test_a_visitor_cannot_close_a_job_that_has_an_operator() -> None:
    job = Job()
    job.operator_view()
    ask(job, Close("over"))
    assert job.sent[VISITOR] == [Standby("waiting for more worker pods")]
    assert job.state.closed_reason == ""


@pytest.mark.parametrize("message", [QueryClosed(), Close("over")])
def test_a_visitor_fills_no_place(message: AgentToCoordinator) -> None:
    """Four agents are one short of the target without it: no round may start."""
    job = Job()
    job.announce(0, 1, 2)
    ask(job, message)
    assert job.state.round is None
    assert not job.state.agents.keys() - {"0.0", "1.0", "2.0"}


def test_nothing_else_that_a_visitor_sends_has_an_effect() -> None:
    job = Job()
    job.running(0, 1)
    before = job.state
    ask(job, WorkersSucceeded(job.start_of(0).round))
    assert job.state == before
