"""The coordinator applies the failure rules to the root cause of a round's end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.failures.failure_rules import FailureAction, FailureRule
from elasticjob._runtime.contract.log_rules.rules import LogCondition, LogRule
from elasticjob._runtime.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    Finish,
    HangAction,
    Leaving,
    MemberState,
    Outcome,
    PodState,
    RestartStrategy,
    RoundEnded,
    WorkersFailed,
    WorkersStopped,
)
from support.rendezvous.rounds import Job, job_of, membership_of, pods

FAILS = FailureRule("user-error", FailureAction.FAIL_JOB, exit_codes=(2,))


def ended_by(job: Job, **failure: object) -> RoundEnded:
    """End the round by a failure on agent 1; return the ended round."""
    start = job.start_of(1)
    cause = replace(Failure(FailureClass.USER_ERROR, "j-1-0", job.now, rank=start.rank), **failure)  # type: ignore[arg-type]
    job.send(1, WorkersFailed(start.round, cause))
    job.stopped(*range(len(job.members)))
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
        (FailureAction.REPLACE_POD, 0, True),
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


MET = {"message": "loss is nan at step 6", "log_rule": "steps"}


def test_a_log_rule_that_fails_the_job_comes_before_the_rules() -> None:
    rule = FailureRule("log", FailureAction.IGNORE, reasons=("LogRule",))
    job = job_of(0, 1, failure_rules=(rule,))
    ended = ended_by(job, **MET, ends_job=True)
    assert (ended.rule, ended.action, ended.charged) == ("logRules/steps", FailureAction.FAIL_JOB, False)
    message = "log rule steps matched: rank 1 in j-1-0 failed: LogRule: loss is nan at step 6"
    assert job.finished(0) == Finish(Outcome.FAILED, "FailurePolicyRule", message)


@pytest.mark.parametrize(
    ("rules", "rule"),
    [((), ""), ((FailureRule("log", FailureAction.RESTART_GROUP, reasons=("LogRule",)),), "log"), ((FAILS,), "")],
)
def test_a_log_rule_that_restarts_the_group_is_charged(rules: tuple[FailureRule, ...], rule: str) -> None:
    job = job_of(0, 1, failure_rules=rules)
    ended = ended_by(job, **MET)
    assert (ended.rule, ended.charged) == (rule, True)
    assert job.start_of(0).round.number == 2


def test_agents_get_the_log_rules_with_their_round() -> None:
    rules = (LogRule("steps", r"step (?P<step>\d+)", conditions=(LogCondition("step", above=5.0),)),)
    job = job_of(0, 1, log_rules=rules)
    assert job.start_of(0).log_rules == job.start_of(1).log_rules == rules


REPLACING = [FailureAction.REPLACE_POD, FailureAction.REPLACE_POD_AND_AVOID_NODE]
LEFT = Finish(Outcome.LEFT, "NodeLeft", "failurePolicy rule machine replaces its pod")


def replaced_by(action: FailureAction) -> FailureRule:
    return FailureRule("machine", action, exit_codes=(3,))


@pytest.mark.parametrize("action", REPLACING)
def test_the_node_of_the_failed_worker_leaves_and_the_others_go_on(action: FailureAction) -> None:
    job = job_of(0, 1, 2, failure_rules=(replaced_by(action),))
    ended = ended_by(job, exit_code=3)
    assert (ended.rule, ended.action, ended.charged) == ("machine", action, True)
    assert [job.finished(index) for index in (0, 1, 2)] == [None, LEFT, None]
    assert job.members == ["j-0-0", "j-2-0"]
    assert job.start_of(0).restarts == 1
    successor = pods(1, incarnation=1, state=PodState.STARTING)
    job.operator_view(*pods(0, 2), *successor, charged=1, charged_round=ended.round)
    job.started(0, 2)
    job.announce(1, incarnation=1)
    job.stopped(0, 2)
    assert job.members == ["j-0-0", "j-2-0", "j-1-1"]


def test_the_next_round_waits_for_the_new_pod_if_the_others_are_too_few() -> None:
    job = job_of(0, 1, failure_rules=(replaced_by(FailureAction.REPLACE_POD),))
    ended = ended_by(job, exit_code=3)
    assert (job.finished(1), job.members) == (LEFT, [])
    job.operator_view(*pods(0), *pods(1, incarnation=1), charged=1, charged_round=ended.round)
    job.announce(1, incarnation=1)
    assert job.members == ["j-0-0", "j-1-1"]
    assert job.state.confirmation_requested_at is None, "a node that was released is not missing"


def test_a_failure_that_another_rule_matches_replaces_nothing() -> None:
    other = FailureRule("flaky", FailureAction.RESTART_GROUP, exit_codes=(4,))
    job = job_of(0, 1, failure_rules=(other, replaced_by(FailureAction.REPLACE_POD)))
    ended_by(job, exit_code=4)
    assert job.members == ["j-0-0", "j-1-0"]


def test_the_last_failure_that_the_budget_allows_replaces_nothing() -> None:
    job = job_of(0, 1, max_restarts=0, failure_rules=(replaced_by(FailureAction.REPLACE_POD),))
    ended_by(job, exit_code=3)
    assert {f.outcome for index in (0, 1) if (f := job.finished(index))} == {Outcome.FAILED}


def test_all_nodes_leave_if_the_strategy_is_recreate() -> None:
    rules = (replaced_by(FailureAction.REPLACE_POD),)
    job = job_of(0, 1, restart_strategy=RestartStrategy.RECREATE, failure_rules=rules)
    ended_by(job, exit_code=3)
    assert {f.outcome for index in (0, 1) if (f := job.finished(index))} == {Outcome.LEFT}


def test_a_successor_store_that_concludes_the_round_applies_the_rule() -> None:
    before = job_of(0, 1, failure_rules=(replaced_by(FailureAction.REPLACE_POD),))
    start = before.start_of(1)
    job = Job(before.state.settings, store=1, recovering=True)
    job.announce(0, membership=membership_of(before.start_of(0), MemberState.STOPPED))
    job.announce(1, membership=membership_of(start, MemberState.FAILED))
    failure = Failure(FailureClass.USER_ERROR, "j-1-0", job.now, rank=start.rank, exit_code=3)
    job.send(1, WorkersFailed(start.round, failure))
    assert job.finished(1) is None
    job.send(1, WorkersStopped(start.round, 6001))
    assert job.finished(1) == LEFT
