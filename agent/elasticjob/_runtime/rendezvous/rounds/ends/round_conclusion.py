"""What follows from a round whose members have all stopped, succeeded or are lost. Pure.

A failed round has a root cause. It decides whether a restart is charged, whether the job fails, and which pods are
replaced.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.failures.failure_rules import (
    LOG_RULES,
    REPLACING_ACTIONS,
    UNCOUNTED_ACTIONS,
    FailureAction,
    describe_rule,
    first_match,
    shell_exit_code,
)
from elasticjob._runtime.contract.failures.failure_text import (
    HANG_FAILS_THE_JOB,
    LOG_RULE_REASON,
    describe_worker_failure,
    with_ended_ranks,
)
from elasticjob._runtime.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    HangAction,
    MemberState,
    Outcome,
    RestartStrategy,
    RoundEnded,
    SuccessPolicy,
)
from elasticjob._runtime.contract.names import FINAL_EXCEPTIONS
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.diagnosis import root_cause
from elasticjob._runtime.rendezvous.decision import RoundDecision, pod_names
from elasticjob._runtime.rendezvous.rounds.job_outcome import declare_outcome
from elasticjob._runtime.rendezvous.rounds.starts import confirmation, restart_delay
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    Round,
    RoundEnding,
    add_ended_round,
    departure_reason,
    running_stage,
)


def declare_success(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Declare success once every member has reported that its workers succeeded, or one if the policy is Any."""
    round_ = state.round
    if round_ is None:
        return None
    if state.settings.success_policy is SuccessPolicy.ANY:
        return _declare_success_of_one(state, round_, now)
    if round_.ending is not None and round_.ending.planned_stop is None:
        return None
    if not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values()):
        return None
    ended = _round_ended(state, round_, EndReason.SUCCEEDED, "all workers succeeded", now)
    state = add_ended_round(replace(state, round=None), ended)
    return declare_outcome(state, Outcome.SUCCEEDED, "AllAgentsSucceeded", None)


def _declare_success_of_one(state: CoordinatorState, round_: Round, now: float) -> RoundDecision | None:
    """Declare success of the first member whose workers have all succeeded, even if the round is ending: its work is
    done. `Finish` makes the agents of the others stop their workers."""
    pod = next((m.pod for m in round_.members.values() if m.state is MemberState.SUCCEEDED), None)
    if pod is None:
        return None
    ended = _round_ended(state, round_, EndReason.SUCCEEDED, f"all workers of {pod} succeeded", now)
    state = add_ended_round(replace(state, round=None), ended)
    return declare_outcome(state, Outcome.SUCCEEDED, "SuccessPolicy", None)


def conclude_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Conclude an ending round once each member has stopped or is lost: find the root cause and charge it.

    Then fail the job, or set the delay before the next round and the pods that are replaced.
    """
    round_ = state.round
    if round_ is None or round_.ending is None or not all(m.accounted_for for m in round_.members.values()):
        return None
    ended = _ended_with_cause(state, round_, round_.ending, now)
    hang = ended.failure is not None and ended.failure.kind is FailureClass.HANG
    fatal_hang = hang and ended.charged and state.settings.hang_action is HangAction.FAIL_JOB
    ended = ended if fatal_hang else _apply_failure_rules(state, ended)
    failed_by_rule = ended.action is FailureAction.FAIL_JOB
    unrecoverable = FINAL_EXCEPTIONS.get(ended.failure.exception, "") if ended.failure is not None else ""
    at_once = fatal_hang or failed_by_rule or bool(unrecoverable)
    job_failed = at_once or (ended.charged and state.charged_at(ended.time) >= state.settings.max_restarts)
    # The failure that ends the job starts no restart, so none is charged.
    ended = replace(ended, charged=ended.charged and not job_failed)
    stop_seconds = now - round_.ending.since
    shortest = stop_seconds if state.shortest_stop is None else min(stop_seconds, state.shortest_stop)
    state = replace(confirmation.record_ended_round(state, round_), shortest_stop=shortest)
    state = add_ended_round(replace(state, round=None, joiners_since=None), ended)
    if job_failed:
        by_rule = "FailurePolicyRule" if fatal_hang or failed_by_rule else ""
        reason = by_rule or unrecoverable or "MaxRestartsExceeded"
        return declare_outcome(
            state, Outcome.FAILED, reason, ended.failure, _describe_job_failure(state, ended, reason)
        )
    if ended.reason is EndReason.WORKER_FAILED:
        state = restart_delay.delay_next_round(state, ended.time, now)
    state = replace(state, replaced={**state.replaced, **_replaced_pods(state, round_, ended)})
    return RoundDecision(state, reason=f"round {round_.id} ended: {ended.message}")


def _recreates(state: CoordinatorState, ended: RoundEnded) -> bool:
    """Return whether the pods of the round are replaced: a fault ended it, and restartStrategy is Recreate."""
    fault = ended.reason in (EndReason.WORKER_FAILED, EndReason.AGENT_LOST)
    return fault and state.settings.restart_strategy is RestartStrategy.RECREATE


def _replaced_pods(state: CoordinatorState, round_: Round, ended: RoundEnded) -> dict[str, str]:
    """Return the pods that are replaced, and why: all pods of the round, or the pod whose worker has failed."""
    if _recreates(state, ended):
        why = f"restartStrategy is Recreate, and round {round_.id} has failed"
        return dict.fromkeys((m.pod for m in round_.members.values()), why)
    if ended.failure is None or ended.action not in REPLACING_ACTIONS:
        return {}
    return {ended.failure.pod: f"failurePolicy rule {ended.rule} replaces its pod"}


def _apply_failure_rules(state: CoordinatorState, ended: RoundEnded) -> RoundEnded:
    """Return the ended round with the first rule that matches its root cause; unchanged if no rule matches.

    A log rule whose action is FailJob comes before these rules, as hangPolicy.action does. Only a round that a worker
    ended has a failure of the program. The rule applies even if the round is counted already: another failure of the
    same round may have matched no rule.
    """
    failure = ended.failure
    if failure is None or ended.reason is not EndReason.WORKER_FAILED:
        return ended
    if failure.ends_job:
        return replace(ended, rule=f"{LOG_RULES}{failure.log_rule}", action=FailureAction.FAIL_JOB)
    code = shell_exit_code(failure.exit_code, failure.signal)
    reasons = [failure.kind.value, *([LOG_RULE_REASON] if failure.log_rule else [])]
    rule = first_match(state.settings.failure_rules, code, reasons)
    if rule is None:
        return ended
    counts = rule.action not in UNCOUNTED_ACTIONS
    return replace(ended, rule=rule.name, action=rule.action, charged=ended.charged and counts)


def _ended_with_cause(state: CoordinatorState, round_: Round, ending: RoundEnding, now: float) -> RoundEnded:
    """Return the ended round with its root cause.

    Failures of members that were lost or left are never the cause. A broken collective is not the cause if a member was
    lost or left, or if the round ended for another reason than a failed worker.
    """
    lost = tuple(m.pod for m in round_.members.values() if m.lost)
    excused = {*lost}
    left = tuple(
        n.pod
        for a in round_.members
        if (n := state.agents.get(a)) and n.pod not in excused and departure_reason(state, n)
    )
    excused |= {*left}
    cause = root_cause(f for f in round_.failures if f.pod not in excused)
    broken_collective = cause is not None and cause.kind is FailureClass.COLLECTIVE_FAILED
    if cause and not (broken_collective and (excused or ending.reason is not EndReason.WORKER_FAILED)):
        ended_ranks = {rank for ranks in round_.ended_ranks for rank in ranks}
        cause = replace(cause, stage=running_stage(state))
        cause = with_ended_ranks(cause, ended_ranks) if broken_collective else cause
        return _round_ended(state, round_, EndReason.WORKER_FAILED, describe_worker_failure(cause), now, failure=cause)
    if lost or ending.reason is EndReason.AGENT_LOST:
        message = f"{pod_names(lost)} lost" if lost else ending.message
        return _round_ended(state, round_, EndReason.AGENT_LOST, message, now, lost_or_left=lost)
    if left and ending.reason is not EndReason.SCALING_DOWN:
        unhealthy = next((state.unhealthy[pod] for pod in left if pod in state.unhealthy), None)
        message = f"{unhealthy.pod} is unhealthy: {unhealthy.message}" if unhealthy else f"{pod_names(left)} left"
        return _round_ended(state, round_, EndReason.NODE_LEFT, message, now, failure=unhealthy, lost_or_left=left)
    return _round_ended(state, round_, ending.reason, ending.message, now)


def _round_ended(
    state: CoordinatorState,
    round_: Round,
    reason: EndReason,
    message: str,
    now: float,
    *,
    failure: Failure | None = None,
    lost_or_left: tuple[str, ...] = (),
) -> RoundEnded:
    # A store that was lost may have concluded the same round before, or a pod of the round has ended: status then
    # contains the charge.
    charged = reason is EndReason.WORKER_FAILED and not state.is_counted(round_.id)
    return RoundEnded(round_.id, reason, message, charged, state.epoch + now, round_.world_size, failure, lost_or_left)


def _describe_job_failure(state: CoordinatorState, ended: RoundEnded, reason: str) -> str:
    """Return why the job has failed, in the words of the condition Failed."""
    if reason == "FailurePolicyRule" and ended.action is not FailureAction.FAIL_JOB:
        return f"{HANG_FAILS_THE_JOB}; last failure: {ended.message}"
    if reason == "FailurePolicyRule":
        return f"{describe_rule(ended.rule)} matched: {ended.message}"
    if reason in FINAL_EXCEPTIONS.values():
        return f"no restart can mend this: {ended.message}"
    settings = state.settings
    within = f" within {settings.restart_window:g} s" if settings.restart_window else ""
    restarts = f"{state.charged_at(ended.time)} of {with_noun(settings.max_restarts, 'restart')}{within}"
    return f"workers failed after {restarts}; last failure: {ended.message}"
