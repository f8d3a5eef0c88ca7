"""failurePolicy.backoffSeconds: after which ends of rounds, and for how long, no round starts."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract.failures.failure_rules import FailureAction, FailureRule
from elasticjob._runtime.contract.messages import (
    MemberState,
    Outcome,
    PodState,
    RoundPhase,
    WorkersFailed,
    WorkersStopped,
)
from elasticjob._runtime.rendezvous.rounds import rounds
from support.rendezvous.rounds import Job, job_of, membership_of, pods


def fail(job: Job) -> None:
    """End the round of agents 0 and 1 by a failure on agent 1."""
    job.fail(1)
    job.stopped(0, 1)


def assert_waits(job: Job, seconds: float) -> None:
    """Fail unless the next round starts after so many seconds, and not before."""
    assert job.phase() is RoundPhase.GATHERING
    assert f"the next round starts {seconds:g} s after the failure" in job.report.reason
    assert rounds.next_deadline(job.state, job.now) == job.now + seconds
    job.advance(seconds - 1)
    assert job.phase() is RoundPhase.GATHERING
    job.advance(1)
    assert job.phase() is RoundPhase.RUNNING


def test_the_wait_doubles_with_each_restart_up_to_its_limit() -> None:
    job = job_of(0, 1, max_restarts=9, backoff=10.0, max_backoff=35.0)
    for seconds in (10, 20, 35, 35):
        fail(job)
        assert_waits(job, seconds)
        job.started(0, 1)


def test_each_window_of_restarts_begins_with_the_first_wait() -> None:
    job = job_of(0, 1, max_restarts=9, backoff=10.0, restart_window=60.0)
    for pause, seconds in ((0, 10), (0, 20), (60, 10)):
        job.advance(pause)
        fail(job)
        assert_waits(job, seconds)
        job.started(0, 1)


def test_without_the_setting_nothing_waits() -> None:
    job = job_of(0, 1)
    fail(job)
    assert job.start_of(0).round.number == 2
    assert job.state.restart_delay is None


@pytest.mark.parametrize("action", [FailureAction.RESTART_GROUP_UNCOUNTED, FailureAction.IGNORE])
def test_a_failure_that_does_not_count_waits_too_but_does_not_lengthen_the_wait(action: FailureAction) -> None:
    rule = FailureRule("flaky", action, exit_codes=(1,))
    job = job_of(0, 1, max_restarts=0, backoff=10.0, failure_rules=(rule,))
    for _ in range(3):
        fail(job)
        assert_waits(job, 10)
        job.started(0, 1)


def test_a_job_that_fails_does_not_wait() -> None:
    job = job_of(0, 1, max_restarts=0, backoff=10.0)
    fail(job)
    assert job.report.outcome is Outcome.FAILED


@pytest.mark.parametrize("end", ["a lost node", "a drain"])
def test_other_ends_wait_for_nothing(end: str) -> None:
    job = job_of(0, 1, 2, backoff=10.0)
    if end == "a drain":
        job.leave(2)
        job.stopped(2)
    else:
        job.disconnect(2)
        job.advance(1)
    job.stopped(0, 1)
    assert job.start_of(0).round.number == 2


@pytest.mark.parametrize(("setting", "left"), [({"backoff": 3.0}, 2), ({"max_backoff": 5.0}, 4), ({"backoff": 0.0}, 0)])
def test_a_wait_can_be_shortened(setting: dict[str, Any], left: float) -> None:
    job = job_of(0, 1, backoff=10.0)
    fail(job)
    job.advance(1)
    job.operator_view(*pods(0, 1), charged=1, charged_round=job.report.ended_rounds[-1].round, **setting)
    assert job.phase() is (RoundPhase.GATHERING if left else RoundPhase.RUNNING)
    if left:
        job.advance(left - 0.5)
        assert job.phase() is RoundPhase.GATHERING
        job.advance(0.5)
        assert job.phase() is RoundPhase.RUNNING


def test_after_the_wait_the_report_says_what_is_missing() -> None:
    job = job_of(0, 1, backoff=10.0)
    fail(job)
    job.disconnect(1)
    job.advance(10)
    assert job.report.reason == "1 of at least 2 worker pods available"
    assert rounds.next_deadline(job.state, job.now) is None


# ---- pods that fail together with their agents -------------------------------------------------------------------


def count_pod(job: Job, *others: int) -> None:
    """Let the operator count the end of pod 1 in round 1, and replace the pod."""
    failed = job.start_of(1).round
    successor = pods(1, incarnation=1, state=PodState.STARTING)
    job.operator_view(*pods(0, *others), *successor, charged=1, charged_rounds=(failed,))


def test_a_job_that_lacks_a_pod_waits_once_its_failure_is_counted() -> None:
    job = job_of(0, 1, backoff=10.0)
    job.disconnect(1)
    job.advance(1)
    job.stopped(0)
    count_pod(job)
    job.announce(1, incarnation=1)
    assert_waits(job, 10)


def test_a_pod_may_be_counted_before_the_other_nodes_have_stopped() -> None:
    job = job_of(0, 1, backoff=10.0)
    job.disconnect(1)
    job.advance(1)
    assert job.phase() is RoundPhase.ENDING
    count_pod(job)
    job.stopped(0)
    job.announce(1, incarnation=1)
    assert_waits(job, 10)


def test_a_pod_that_is_counted_later_does_not_touch_the_round_of_the_others() -> None:
    job = job_of(0, 1, 2, backoff=10.0)
    job.disconnect(1)
    job.advance(1)
    job.stopped(0, 2)
    assert job.members == ["j-0-0", "j-2-0"]
    count_pod(job, 2)
    assert job.state.restart_delay is None


def test_the_charge_of_a_round_does_not_begin_the_wait_again() -> None:
    job = job_of(0, 1, backoff=10.0)
    fail(job)
    ended = job.report.ended_rounds[-1].round
    job.advance(5)
    job.operator_view(*pods(0, 1), charged=1, charged_round=ended)
    job.advance(5)
    assert job.phase() is RoundPhase.RUNNING


def test_the_restarts_of_an_earlier_execution_delay_nothing() -> None:
    job = Job()
    job.operator_view(*pods(0, 1), charged=2, target=2, backoff=10.0)
    job.announce(0, 1)
    assert job.phase() is RoundPhase.RUNNING


# ---- other stores -------------------------------------------------------------------------------------------------


def test_a_successor_store_that_concludes_the_round_waits_as_long_again() -> None:
    before = job_of(0, 1, backoff=10.0)
    fail(before)
    ended, start = before.report.ended_rounds[-1], before.start_of(1)
    assert ended.failure is not None
    job = Job(before.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0, 1), charged=1, charged_round=ended.round)
    job.announce(0, membership=membership_of(before.start_of(0), MemberState.STOPPED))
    job.announce(1, membership=membership_of(start, MemberState.FAILED))
    job.send(1, WorkersFailed(start.round, ended.failure))
    job.send(1, WorkersStopped(start.round, 6001))
    assert not job.report.ended_rounds[-1].charged
    assert_waits(job, 10)


def test_a_successor_store_that_finds_no_failure_waits_for_nothing() -> None:
    before = job_of(0, 1, backoff=10.0)
    job = Job(before.state.settings, store=1, recovering=True)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index), MemberState.STOPPED))
    job.operator_view(*pods(0, 1), charged=3)
    assert job.phase() is RoundPhase.RUNNING
