"""Restarts: which failures are charged, each exactly once, and when the budget is exhausted.

Two things are charged: an ended round that the coordinator reports as charged, and a pod that failed by itself. The
status write that counts a round also raises `chargedRound` to it, and the write that counts a pod also names its
successor: so neither is ever counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from elasticjob.contract.messages import Failure, FailureClass, RoundEnded
from elasticjob.contract.names import RoundId
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.raw import moment, objects
from elasticjob_operator.plan import failures
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pod_decisions import PodDecision, ReplacePod

MAX_RECENT_FAILURES = 10
"""Number of failures that status keeps."""


@dataclass(frozen=True)
class Budget:
    """The restart counters of the next status, and the failures that are new to it."""

    restarts: int
    counted: int
    """Restarts that count towards maxRestarts."""
    charged_round: RoundId | None
    charged: tuple[dict[str, Any], ...] = ()
    """New failures that are charged, oldest first."""
    uncharged: tuple[dict[str, Any], ...] = ()
    """New failures that are not charged."""
    exhausted: bool = False
    """Whether a failure exceeded the budget: the job has failed."""
    last_round: RoundEnded | None = None
    """The newest round that ended since the last status."""
    event_records: tuple[EventRecord, ...] = ()

    def charge(self, limit: int, record: dict[str, Any], event: EventRecord) -> Budget:
        """Return the budget with one more failure charged; `limit` is maxRestarts."""
        spent = replace(self, charged=(*self.charged, record), event_records=(*self.event_records, event))
        if self.counted >= limit:
            return replace(spent, exhausted=True)
        return replace(spent, restarts=self.restarts + 1, counted=self.counted + 1)


def unchanged_budget(ctx: ReconcileContext) -> Budget:
    """Return the counters of the last status."""
    return Budget(ctx.status.restarts, ctx.status.restarts_counted, ctx.status.charged_round)


def plan_budget(ctx: ReconcileContext, decisions: Iterable[PodDecision]) -> Budget:
    """Return the budget after every newly ended round and every newly failed pod.

    Failures that are not charged are recorded all the same.
    """
    decisions = tuple(decisions)
    uncharged = tuple(record for decision in decisions if (record := failures.uncharged_record(decision, ctx.now)))
    budget = replace(unchanged_budget(ctx), uncharged=uncharged)
    budget = _record_stall(ctx, budget)
    for ended in _new_rounds(ctx):
        budget = _charge_round(ctx, budget, ended, decisions)
    for pod in _failed_pods(decisions):
        if not _already_charged(ctx, pod):
            record = failures.pod_record(pod, ctx.now)
            event = EventRecord("WorkerFailed", failures.describe_record(record), key=pod.name, warning=True)
            budget = budget.charge(ctx.spec.max_restarts, record, event)
    return budget


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
    if not ended.charged or ended.failure is None or _excused(ended.failure, decisions):
        return budget
    record = failures.worker_record(ended.failure, ctx.node_of(ended.failure.pod))
    reason = "HangDetected" if ended.failure.kind is FailureClass.HANG else "WorkerFailed"
    event = EventRecord(reason, failures.describe_record(record), key=str(ended.round), warning=True)
    return budget.charge(ctx.spec.max_restarts, record, event)


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


def _already_charged(ctx: ReconcileContext, pod: Pod) -> bool:
    """Pods that fail together are one failure: return whether the pod existed at the last charge, and no round has
    formed since."""
    charged_at = moment(ctx.status.raw, "lastRestartTime") or 0.0
    return charged_at > ctx.status.last_rendezvous and pod.created < int(charged_at)
