"""The coordinator charges restarts to a window of time."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.messages import Outcome
from support.rendezvous.rounds import job_of, pods


@pytest.mark.parametrize(("pause", "outcome", "restarts"), [(59.0, Outcome.FAILED, 1), (60.0, None, 1)])
def test_only_restarts_of_the_window_count(pause: float, outcome: Outcome | None, restarts: int) -> None:
    job = job_of(0, 1, max_restarts=1, restart_window=60.0)
    job.fail(0)
    job.stopped(0, 1)
    assert job.start_of(0).restarts == 1
    job.started(0, 1)
    job.advance(pause)
    job.fail(1)
    job.stopped(0, 1)
    assert (job.report.outcome, job.start_of(0).restarts) == (outcome, restarts)
    assert job.start_of(0).round.number == (2 if outcome else 3)


@pytest.mark.parametrize(("age", "outcome"), [(59.0, Outcome.FAILED), (60.0, None)])
def test_the_window_of_the_status_goes_on(age: float, outcome: Outcome | None) -> None:
    job = job_of(0, 1, max_restarts=1, restart_window=60.0)
    job.advance(100.0)
    job.operator_view(*pods(0, 1), charged=1, charged_since=job.state.epoch + job.now - age)
    job.fail(0)
    job.stopped(0, 1)
    assert job.report.outcome is outcome
