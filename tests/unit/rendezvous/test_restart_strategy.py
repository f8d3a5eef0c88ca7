"""restartStrategy Recreate: the agents of a failed round leave instead of starting workers again."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import EndReason, Finish, Outcome, RestartStrategy, RoundPhase, RoundSettings
from support.rendezvous.rounds import Job, agent_id, job_of, pods

RECREATE: dict[str, Any] = {"restart_strategy": RestartStrategy.RECREATE}


def outcomes(job: Job, *indices: int) -> list[Outcome | None]:
    """Return the outcome in the `Finish` that each agent got; None for an agent that got none."""
    return [finish.outcome if (finish := job.finished(index)) else None for index in indices]


def test_all_nodes_of_a_failed_round_leave_and_the_restart_is_charged_once() -> None:
    job = job_of(0, 1, **RECREATE)
    failed = job.start_of(0).round
    job.fail(1)
    job.stopped(0, 1)
    assert outcomes(job, 0, 1) == [Outcome.LEFT, Outcome.LEFT]
    assert (job.phase(), job.state.charged) == (RoundPhase.GATHERING, 1)
    job.operator_view(*pods(0, 1, incarnation=1), charged=1, charged_round=failed, **RECREATE)
    job.announce(0, incarnation=1)
    job.announce(1, incarnation=1)
    start = job.start_of(0, 1)
    assert (start.round.number, start.restarts, job.state.confirmation_requested_at) == (2, 1, None)


def test_a_node_of_the_round_that_connects_again_leaves_too() -> None:
    job = job_of(0, 1, **RECREATE)
    job.disconnect(0)
    job.fail(1)
    job.advance(60)
    job.stopped(1)
    assert job.report.ended_rounds[-1].reason in (EndReason.AGENT_LOST, EndReason.WORKER_FAILED)
    assert outcomes(job, 1) == [Outcome.LEFT]


def test_a_node_whose_link_closes_before_it_receives_that_it_leaves_joins_no_round() -> None:
    """The explorer found it: ('fail', 0), then ('blip', 2) while `Finish` is on its way to agent 2."""
    job = job_of(0, 1, 2, **RECREATE)
    job.operator_view(*pods(0, 1, 2), **RECREATE)
    job.fail(1)
    job.stopped(0, 1, 2)
    job.disconnect(2)
    job.announce(2)
    assert [m.outcome for m in job.sent[agent_id(2)] if isinstance(m, Finish)] == [Outcome.LEFT, Outcome.LEFT]
    job.advance(60)
    assert (job.phase(), job.state.round_number) == (RoundPhase.GATHERING, 1)
    job.operator_view(*pods(0, 1, 2, incarnation=1), **RECREATE)
    assert not job.state.replaced


def test_a_node_outside_the_failed_round_stays() -> None:
    job = job_of(0, 1, spares=1, **RECREATE)
    job.operator_view(*pods(0, 1, 2), spares=1, **RECREATE)
    job.announce(2)
    job.fail(1)
    job.stopped(0, 1)
    assert outcomes(job, 0, 1, 2) == [Outcome.LEFT, Outcome.LEFT, None]


def test_a_planned_end_recreates_nothing() -> None:
    job = job_of(0, 1, **RECREATE)
    job.leave(1)
    job.stopped(0, 1)
    assert outcomes(job, 0, 1) == [None, Outcome.LEFT]


def test_an_exhausted_budget_ends_the_job() -> None:
    job = job_of(0, 1, max_restarts=0, **RECREATE)
    job.fail(1)
    job.stopped(0, 1)
    assert outcomes(job, 0, 1) == [Outcome.FAILED, Outcome.FAILED]


def test_an_operator_that_does_not_know_the_setting_restarts_in_place() -> None:
    raw = codec.loads(codec.dumps(RoundSettings(1, 2, 2)))
    assert isinstance(raw, dict)
    del raw["restart_strategy"]
    assert codec.parse(RoundSettings, raw).restart_strategy is RestartStrategy.IN_PLACE
