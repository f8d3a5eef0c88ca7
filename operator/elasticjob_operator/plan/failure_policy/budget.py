"""Restarts: which failures are charged, and when the budget is exhausted.

Two things are charged: an ended round that the coordinator reports as charged, and a pod that failed by itself. The
failures of one outage are charged once, in whatever order the operator sees them. An outage has a name that follows
from the failure itself: the round in which the worker or the pod failed, or for pods that were in no round yet the
attempt to start them. A rule of failurePolicy.rules decides on one failure; an outage is charged if one of its failures
is. Status names the last outages that it includes. It also names the last ended round that it
includes, and the write that counts a pod names the pod's successor: so nothing is looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, assert_never

from elasticjob._runtime.contract.failures.failure_rules import FailureAction
from elasticjob._runtime.contract.failures.restart_window import RestartWindow
from elasticjob._runtime.contract.messages import EndReason, Failure, FailureClass, RoundEnded
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import objects
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.job.status import AvoidedNode
from elasticjob_operator.model.job.status_lists import parse_round
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.failure_policy import failures
from elasticjob_operator.plan.failure_policy.rule_records import (
    MatchedRule,
    avoided_node,
    matched_event,
    matching_rule,
    with_rule,
)
from elasticjob_operator.plan.pods.pod_decisions import PodDecision, ReplacePod
from elasticjob_operator.plan.pods.start_attempts import StartAttempts

MAX_OUTAGES = 32
"""Number of charged outages that status names. A kubelet reports the end of a pod within seconds, and a pod that is
replaced is not looked at again: no failure comes so late that 32 other outages were charged before it."""
MAX_RECENT_FAILURES = 10
"""Number of failures that status keeps."""


@dataclass(frozen=True)
class NewFailure:
    """A failure that status does not include yet."""

    outage: str
    record: dict[str, Any]
    event: EventRecord
    """The Event of the failure itself."""
    time: float
    """When it happened: Unix seconds of the store for a round, of the kubelet for a pod that has ended."""


@dataclass(frozen=True)
class Budget:
    """The restart counters of the next status, and the failures that are new to it."""

    restarts: int
    counted: int
    """Restarts that count towards maxRestarts: those of the restart window, if there is one."""
    charged_round: RoundId | None
    outages: tuple[str, ...] = ()
    """Names of the charged outages, oldest first."""
    charged: tuple[dict[str, Any], ...] = ()
    """New failures that are charged, oldest first."""
    uncharged: tuple[dict[str, Any], ...] = ()
    """New failures that are not charged."""
    counted_since: float = 0.0
    """When the first failure of the restart window happened, Unix seconds; 0 without a window."""
    uncounted_outages: tuple[str, ...] = ()
    """Names of outages whose restart is in `restarts` only, oldest first."""
    exhausted: bool = False
    """Whether a failure exceeded the budget: the job has failed."""
    failed_by_rule: dict[str, Any] | None = None
    """The failure that a rule with the action FailJob matched: the job has failed."""
    last_round: RoundEnded | None = None
    """The newest round that ended since the last status."""
    avoided: tuple[AvoidedNode, ...] = ()
    """The nodes of new failures that a rule with the action ReplacePodAndAvoidNode matched."""
    event_records: tuple[EventRecord, ...] = ()

    @property
    def window(self) -> RestartWindow:
        """The restarts that count, with the begin of their window."""
        return RestartWindow(self.counted, self.counted_since)

    def charge(self, spec: JobSpec, failure: NewFailure) -> Budget:
        """Return the budget with this failure's outage charged, unless it is already."""
        outage = failure.outage
        if outage in self.outages:
            return self
        spent = replace(
            self,
            outages=(*self.outages, outage),
            charged=(*self.charged, failure.record),
            event_records=(*self.event_records, failure.event),
        )
        window = self.window.at(failure.time, spec.restart_window)
        if window.count >= spec.max_restarts:
            return replace(spent, exhausted=True)
        restarts = self.restarts + (outage not in self.uncounted_outages)
        after = window.with_restart(failure.time, spec.restart_window)
        return replace(spent, restarts=restarts, counted=after.count, counted_since=after.start)

    def restart_uncounted(self, outage: str) -> Budget:
        """Return the budget with the restart after this outage, which maxRestarts does not count."""
        if outage in (*self.outages, *self.uncounted_outages):
            return self
        return replace(self, restarts=self.restarts + 1, uncounted_outages=(*self.uncounted_outages, outage))

    def record(self, record: dict[str, Any], *events: EventRecord) -> Budget:
        """Return the budget with a failure that is not charged."""
        return replace(self, uncharged=(*self.uncharged, record), event_records=(*self.event_records, *events))


def unchanged_budget(ctx: ReconcileContext) -> Budget:
    """Return the counters of the last status."""
    status = ctx.status
    return Budget(
        status.restarts,
        status.restarts_counted,
        status.charged_round,
        status.charged_outages,
        counted_since=status.restart_window_start,
        uncounted_outages=status.uncounted_outages,
    )


def plan_budget(ctx: ReconcileContext, decisions: Iterable[PodDecision], starts: StartAttempts) -> Budget:
    """Return the budget after every newly ended round and every newly failed pod.

    Failures that are not charged are recorded too.
    """
    decisions = tuple(decisions)
    budget = unchanged_budget(ctx)
    for decision in decisions:
        budget = _record_uncharged(ctx, budget, decision)
    budget = _record_stall(ctx, _record_start(ctx, budget, starts))
    for ended in ctx.new_rounds:
        budget = _charge_round(ctx, budget, ended, decisions)
    for pod in _failed_pods(decisions):
        record = failures.pod_record(pod, ctx.now)
        event = EventRecord("WorkerFailed", failures.describe_record(record), key=pod.name, warning=True)
        failure = NewFailure(outage_of(pod), record, event, _ended_at(ctx, pod))
        budget = _apply_rule(ctx, budget, failure, matching_rule(ctx.spec.failure_rules, pod, record))
    return budget


def _ended_at(ctx: ReconcileContext, pod: Pod) -> float:
    return (pod.end.time if pod.end else 0.0) or ctx.now


def outage_of(pod: Pod) -> str:
    """Return the name of the outage that a failed pod belongs to: its last round, else the attempt to start it."""
    if pod.end is not None and pod.end.round is not None:
        return str(pod.end.round)
    return f"start-{pod.failed_starts}"


def charged_rounds(budget: Budget) -> tuple[RoundId, ...]:
    """Return the charged rounds whose end the coordinator has not reported yet."""
    rounds = filter(None, map(parse_round, budget.outages))
    return tuple(r for r in rounds if budget.charged_round is None or r > budget.charged_round)


def _apply_rule(ctx: ReconcileContext, budget: Budget, failure: NewFailure, rule: MatchedRule | None) -> Budget:
    """Return the budget after a failure that this rule matched; without a rule it is charged."""
    outage, record, event = failure.outage, failure.record, failure.event
    if rule is None:
        return budget.charge(ctx.spec, failure)
    record, matched = with_rule(record, rule), matched_event(outage, record, rule)
    match rule.action:
        case FailureAction.FAIL_JOB:
            events = (*budget.event_records, event, matched)
            return replace(budget, failed_by_rule=budget.failed_by_rule or record, event_records=events)
        case FailureAction.RESTART_GROUP | FailureAction.REPLACE_POD | FailureAction.REPLACE_POD_AND_AVOID_NODE:
            budget = replace(budget, avoided=(*budget.avoided, *avoided_node(ctx, record, rule)))
            if outage in budget.outages:
                return budget.record(record, matched)
            charged = budget.charge(ctx.spec, replace(failure, record=record))
            return replace(charged, event_records=(*charged.event_records, matched))
        case FailureAction.RESTART_GROUP_UNCOUNTED:
            return budget.restart_uncounted(outage).record(record, matched)
        case FailureAction.IGNORE:
            return budget.record(record, matched)
        case _:
            assert_never(rule.action)


def _record_uncharged(ctx: ReconcileContext, budget: Budget, decision: PodDecision) -> Budget:
    """Record a pod that Kubernetes or its node ended.

    Only a rule charges it. Such an outage has the pod's name, because the pod may be seen before it ends or after.
    """
    pod, record = decision.pod, failures.uncharged_record(decision, ctx.now)
    if pod is None or record is None:
        return budget
    rule = matching_rule(ctx.spec.failure_rules, pod, record)
    if rule is None:
        return budget.record(record)
    event = EventRecord("WorkerFailed", failures.describe_record(record), key=pod.name, warning=True)
    return _apply_rule(ctx, budget, NewFailure(pod.name, record, event, _ended_at(ctx, pod)), rule)


def _record_start(ctx: ReconcileContext, budget: Budget, starts: StartAttempts) -> Budget:
    """Record a failed attempt to start a pod, once per attempt."""
    if starts.new is None:
        return budget
    record = failures.start_record(starts.new, ctx.now)
    event = EventRecord("PodStartFailed", failures.describe_record(record), key=str(starts.failed), warning=True)
    return budget.record(record, event)


def _record_stall(ctx: ReconcileContext, budget: Budget) -> Budget:
    """Record a hang or a line of output that ends no round (action Event) once, whatever failed since."""
    stall = ctx.report.stall if ctx.report else None
    if stall is None:
        return budget
    record = failures.worker_record(stall, ctx.node_of(stall.pod))
    identity = ("time", "pod", "class")
    if any(all(known.get(n) == record[n] for n in identity) for known in objects(ctx.status.raw, "recentFailures")):
        return budget
    in_log = bool(stall.log_rule)
    why = "the condition's action" if in_log else "hangPolicy.action"
    message = f"{failures.describe_record(record)}; workers are not restarted because {why} is Event"
    reason = "LogRuleMatched" if in_log else "HangDetected"
    event = EventRecord(reason, message, key=f"{stall.pod}/{stall.time:.3f}", warning=True)
    return budget.record(record, event)


def _charge_round(
    ctx: ReconcileContext, budget: Budget, ended: RoundEnded, decisions: tuple[PodDecision, ...]
) -> Budget:
    budget = replace(budget, charged_round=ended.round, last_round=ended)
    if ended.failure is None:
        return budget
    record = failures.worker_record(ended.failure, ctx.node_of(ended.failure.pod))
    reason = "HangDetected" if ended.failure.kind is FailureClass.HANG else "WorkerFailed"
    event = EventRecord(reason, failures.describe_record(record), key=str(ended.round), warning=True)
    failure = NewFailure(str(ended.round), record, event, ended.time)
    # The coordinator has acted on the rule already: a change of the rules since then must not alter the charge.
    rule = None if ended.action is None else MatchedRule(ended.rule, ended.action)
    if rule is not None and rule.action is FailureAction.FAIL_JOB:
        return _apply_rule(ctx, budget, failure, rule)
    if rule is None and str(ended.round) in budget.outages and ended.reason is EndReason.WORKER_FAILED:
        return budget.record(record)
    if (rule is None and not ended.charged) or _excused(ended.failure, decisions):
        return budget
    return _apply_rule(ctx, budget, failure, rule)


def _excused(failure: Failure, decisions: tuple[PodDecision, ...]) -> bool:
    """Return whether Kubernetes caused the failure, so that its charge is withdrawn before it is persisted.

    A kill is excused if its own pod was disrupted, deleted or lost, a broken collective if any pod was. Failures of the
    program itself are never excused. Only pods without a successor count: an old pod that is stuck on a lost node does
    not excuse later failures.
    """
    taken = {d.pod.name for d in decisions if d.pod and (d.pod.disrupted or d.pod.deleting is not None or _lost(d))}
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return bool(taken)
    return failure.kind is FailureClass.KILLED and failure.pod in taken


def _lost(decision: PodDecision) -> bool:
    return isinstance(decision.action, ReplacePod) and decision.action.lost_at is not None


def _failed_pods(decisions: tuple[PodDecision, ...]) -> list[Pod]:
    return [d.pod for d in decisions if d.pod and isinstance(d.action, ReplacePod) and d.action.charged]
