"""The coordinator applies the failure rules to the root cause of a round's end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob.contract.failure_rules import FailureAction, FailureRule
from elasticjob.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    Finish,
    HangAction,
    Leaving,
    Outcome,
    RoundEnded,
    WorkersFailed,
)
from support.rounds import Job, job_of

FAILS = FailureRule("user-error", FailureAction.FAIL_JOB, exit_codes=(2,))


def ended_by(job: Job, **failure: object) -> RoundEnded:
    """End the round of nodes 0 and 1 by a failure on node 1; return the ended round."""
    start = job.start_of(1)
    cause = replace(Failure(FailureClass.USER_ERROR, "j-1-0", job.now, rank=start.rank), **failure)  # type: ignore[arg-type]
    job.send(1, WorkersFailed(start.round, cause))
    job.stopped(0, 1)
    return job.report.ended_rounds[-1]


def test_a_rule_that_fails_the_job_starts_no_further_round() -> None:
    job = job_of(0, 1, failure_rules=(FAILS,))
    ended = ended_by(job, exit_code=2)
    assert (ended.rule, ended.action, ended.charged) == ("user-error", FailureAction.FAIL_JOB, False)
    assert job.report.outcome is Outcome.FAILED
    message = "failurePolicy rule user-error matched: rank 1 in j-1-0 failed: exit code 2"
    assert job.finished(0) == job.finished(1) == Finish(Outcome.FAILED, "FailurePolicyRule", message)
    assert job.start_of(0).round.number == 1


@pytest.mark.parametrize(
    ("action", "charged", "failed"),
    [
        (FailureAction.RESTART_GROUP, 0, True),
        (FailureAction.RESTART_GROUP_UNCOUNTED, 0, False),
        (FailureAction.IGNORE, 0, False),
    ],
)
def test_what_a_rule_charges_to_an_empty_budget(action: FailureAction, charged: int, failed: bool) -> None:
    job = job_of(0, 1, max_restarts=0, failure_rules=(FailureRule("r", action, exit_codes=(137,)),))
    ended = ended_by(job, signal="SIGKILL", kind=FailureClass.KILLED)
    assert (ended.rule, ended.action) == ("r", action)
    assert (job.report.outcome is Outcome.FAILED) is failed
    assert job.state.charged == charged
    assert job.start_of(0).round.number == (1 if failed else 2)


def test_a_failure_that_no_rule_matches_is_charged() -> None:
    job = job_of(0, 1, failure_rules=(FAILS,))
    ended = ended_by(job, exit_code=1)
    assert (ended.rule, ended.action, ended.charged) == ("", None, True)
    assert job.start_of(0).restarts == 1


def test_a_rule_fails_the_job_though_a_pod_of_the_round_was_charged() -> None:
    job = job_of(0, 1, failure_rules=(FAILS,))
    job.operator_view(
        *job.state.operator_view.pods, charged=1, charged_rounds=(job.start_of(0).round,), failure_rules=(FAILS,)
    )
    assert ended_by(job, exit_code=2).action is FailureAction.FAIL_JOB
    assert job.report.outcome is Outcome.FAILED


def test_the_coordinator_leaves_an_unhealthy_node_to_the_operator() -> None:
    job = job_of(0, 1, failure_rules=(FailureRule("gpu", FailureAction.FAIL_JOB, reasons=("DeviceUnhealthy",)),))
    job.send(1, Leaving("unhealthy", Failure(FailureClass.DEVICE_UNHEALTHY, "j-1-0", job.now, message="ECC")))
    job.stopped(0, 1)
    ended = job.report.ended_rounds[-1]
    assert ended.failure is not None
    assert (ended.reason, ended.rule) == (EndReason.NODE_LEFT, "")
    assert job.report.outcome is None


def test_a_hang_policy_that_fails_the_job_comes_before_the_rules() -> None:
    rule = FailureRule("hang", FailureAction.IGNORE, reasons=("Hang",))
    job = job_of(0, 1, hang_action=HangAction.FAIL_JOB, failure_rules=(rule,))
    assert ended_by(job, kind=FailureClass.HANG, message="no progress").rule == ""
    assert job.report.outcome is Outcome.FAILED


def test_a_rule_may_keep_hangs_from_counting() -> None:
    rule = FailureRule("hang", FailureAction.IGNORE, reasons=("Hang",))
    job = job_of(0, 1, max_restarts=0, failure_rules=(rule,))
    assert ended_by(job, kind=FailureClass.HANG, message="no progress").rule == "hang"
    assert job.start_of(0).round.number == 2
