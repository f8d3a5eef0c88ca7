"""Restarts: which failures are charged, and when the budget is exhausted.

Two things are charged: an ended round that the coordinator reports as charged, and a pod that failed by itself. The
failures of one outage are charged once, in whatever order the operator sees them. An outage has a name that follows
from the failure itself: the round in which the worker or the pod failed, or for pods that were in no round yet the
attempt to start them. Status names the last outages that it includes. It also names the last ended round that it
includes, and the write that counts a pod names the pod's successor: so nothing is looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from elasticjob.contract.messages import EndReason, Failure, FailureClass, RoundEnded
from elasticjob.contract.names import RoundId
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.raw import objects
from elasticjob_operator.model.status import parse_round
from elasticjob_operator.plan import failures
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pod_decisions import PodDecision, ReplacePod
from elasticjob_operator.plan.starts import Starts

MAX_OUTAGES = 32
"""Number of charged outages that status names. A kubelet reports the end of a pod within seconds, and a pod that is
replaced is not looked at again: no failure comes so late that 32 other outages were charged before it."""
MAX_RECENT_FAILURES = 10
"""Number of failures that status keeps."""


@dataclass(frozen=True)
class Budget:
    """The restart counters of the next status, and the failures that are new to it."""

    restarts: int
    counted: int
    """Restarts that count towards maxRestarts."""
    charged_round: RoundId | None
    outages: tuple[str, ...] = ()
    """Names of the charged outages, oldest first."""
    charged: tuple[dict[str, Any], ...] = ()
    """New failures that are charged, oldest first."""
    uncharged: tuple[dict[str, Any], ...] = ()
    """New failures that are not charged."""
    exhausted: bool = False
    """Whether a failure exceeded the budget: the job has failed."""
    last_round: RoundEnded | None = None
    """The newest round that ended since the last status."""
    event_records: tuple[EventRecord, ...] = ()

    def charge(self, limit: int, outage: str, record: dict[str, Any], event: EventRecord) -> Budget:
        """Return the budget with this outage charged, unless it is already; `limit` is maxRestarts."""
        if outage in self.outages:
            return self
        spent = replace(
            self,
            outages=(*self.outages, outage),
            charged=(*self.charged, record),
            event_records=(*self.event_records, event),
        )
        if self.counted >= limit:
            return replace(spent, exhausted=True)
        return replace(spent, restarts=self.restarts + 1, counted=self.counted + 1)


def unchanged_budget(ctx: ReconcileContext) -> Budget:
    """Return the counters of the last status."""
    status = ctx.status
    return Budget(status.restarts, status.restarts_counted, status.charged_round, status.charged_outages)


def plan_budget(ctx: ReconcileContext, decisions: Iterable[PodDecision], starts: Starts) -> Budget:
    """Return the budget after every newly ended round and every newly failed pod.

    Failures that are not charged are recorded all the same.
    """
    decisions = tuple(decisions)
    uncharged = tuple(record for decision in decisions if (record := failures.uncharged_record(decision, ctx.now)))
    budget = replace(unchanged_budget(ctx), uncharged=uncharged)
    budget = _record_stall(ctx, _record_start(ctx, budget, starts))
    for ended in _new_rounds(ctx):
        budget = _charge_round(ctx, budget, ended, decisions)
    for pod in _failed_pods(decisions):
        record = failures.pod_record(pod, ctx.now)
        event = EventRecord("WorkerFailed", failures.describe_record(record), key=pod.name, warning=True)
        budget = budget.charge(ctx.spec.max_restarts, outage_of(pod), record, event)
    return budget


def outage_of(pod: Pod) -> str:
    """Return the name of the outage that a failed pod belongs to: its last round, else the attempt to start it."""
    if pod.end is not None and pod.end.round is not None:
        return str(pod.end.round)
    return f"start-{pod.failed_starts}"


def charged_rounds(budget: Budget) -> tuple[RoundId, ...]:
    """Return the charged rounds whose end the coordinator has not reported yet."""
    rounds = filter(None, map(parse_round, budget.outages))
    return tuple(r for r in rounds if budget.charged_round is None or r > budget.charged_round)


def _record_start(ctx: ReconcileContext, budget: Budget, starts: Starts) -> Budget:
    """Record a failed attempt to start a pod, once per attempt."""
    if starts.new is None:
        return budget
    record = failures.start_record(starts.new, ctx.now)
    event = EventRecord("PodStartFailed", failures.describe_record(record), key=str(starts.failed), warning=True)
    return replace(budget, uncharged=(*budget.uncharged, record), event_records=(*budget.event_records, event))


def _record_stall(ctx: ReconcileContext, budget: Budget) -> Budget:
    """Record a hang that ends no round (hangPolicy.action Event) once per stall, whatever failed since."""
    stall = ctx.report.stall if ctx.report else None
    if stall is None:
        return budget
    record = failures.worker_record(stall, ctx.node_of(stall.pod))
    identity = ("time", "pod", "class")
    if any(all(known.get(n) == record[n] for n in identity) for known in objects(ctx.status.raw, "recentFailures")):
        return budget
    message = f"{failures.describe_record(record)}; workers are not restarted because hangPolicy.action is Event"
    event = EventRecord("HangDetected", message, key=f"{stall.pod}/{stall.time:.3f}", warning=True)
    return replace(budget, uncharged=(*budget.uncharged, record), event_records=(*budget.event_records, event))


def _new_rounds(ctx: ReconcileContext) -> list[RoundEnded]:
    charged = ctx.status.charged_round
    ended = ctx.report.ended_rounds if ctx.report else ()
    return sorted((e for e in ended if charged is None or e.round > charged), key=lambda e: e.round)


def _charge_round(
    ctx: ReconcileContext, budget: Budget, ended: RoundEnded, decisions: tuple[PodDecision, ...]
) -> Budget:
    budget = replace(budget, charged_round=ended.round, last_round=ended)
    if ended.failure is None:
        return budget
    record = failures.worker_record(ended.failure, ctx.node_of(ended.failure.pod))
    if str(ended.round) in budget.outages and ended.reason is EndReason.WORKER_FAILED:
        return replace(budget, uncharged=(*budget.uncharged, record))
    if not ended.charged or _excused(ended.failure, decisions):
        return budget
    reason = "HangDetected" if ended.failure.kind is FailureClass.HANG else "WorkerFailed"
    event = EventRecord(reason, failures.describe_record(record), key=str(ended.round), warning=True)
    return budget.charge(ctx.spec.max_restarts, str(ended.round), record, event)


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
