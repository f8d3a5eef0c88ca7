"""When the coordinator declares success: with successPolicy All, and with Any."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.messages import (
    EndReason,
    Finish,
    Outcome,
    RoundPhase,
    SuccessPolicy,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import AgentMessage
from support.rendezvous.rounds import Job, agent_id, job_of


def running(policy: SuccessPolicy) -> Job:
    job = job_of(0, 1, 2, success_policy=policy)
    job.running(0, 1, 2)
    return job


@pytest.mark.parametrize("policy", SuccessPolicy)
def test_the_success_of_one_node_ends_the_job_only_if_the_policy_is_any(policy: SuccessPolicy) -> None:
    job = running(policy)
    job.succeed(1)
    if policy is SuccessPolicy.ALL:
        assert job.phase() is RoundPhase.RUNNING
        return
    assert all(job.finished(index) == Finish(Outcome.SUCCEEDED, "SuccessPolicy") for index in range(3))
    [ended] = job.report.ended_rounds
    assert (ended.reason, ended.charged) == (EndReason.SUCCEEDED, False)
    assert "j-1-0" in ended.message


def test_a_collective_that_breaks_because_the_first_node_is_done_is_no_failure_of_the_job() -> None:
    job = running(SuccessPolicy.ANY)
    job.succeed(1)
    job.fail(0)
    assert job.state.outcome is Outcome.SUCCEEDED
    assert [e.reason for e in job.report.ended_rounds] == [EndReason.SUCCEEDED]


def test_a_node_that_succeeds_while_its_round_ends_completes_the_job() -> None:
    job = running(SuccessPolicy.ANY)
    job.fail(0)
    assert job.phase() is RoundPhase.ENDING
    job.succeed(2)
    assert job.finished(1) == Finish(Outcome.SUCCEEDED, "SuccessPolicy")


@pytest.mark.parametrize("policy", SuccessPolicy)
def test_a_success_that_arrives_together_with_the_stop_of_its_node_counts(policy: SuccessPolicy) -> None:
    job = running(policy)
    job.fail(0)
    round_id = job.start_of(1).round
    messages = (
        (0, WorkersStopped(round_id, 6000)), (1, WorkersSucceeded(round_id)),
        (1, WorkersStopped(round_id, 6001)), (2, WorkersStopped(round_id, 6002)),
    )  # fmt: skip
    events = [AgentMessage(agent_id(index), message) for index, message in messages]
    state = rounds.decide_together(job.state, events, job.now).state
    assert state.outcome is (Outcome.SUCCEEDED if policy is SuccessPolicy.ANY else None)


def test_a_failure_of_one_node_restarts_the_group_all_the_same() -> None:
    job = running(SuccessPolicy.ANY)
    job.fail(0)
    assert job.sent_end(1, 2)
    job.stopped(0, 1, 2)
    assert job.state.outcome is None
