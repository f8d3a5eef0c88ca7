"""Restarts: what is charged, once each, and when the budget is used up.

Two things are charged: an ended round that its coordinator calls charged, and a pod that ended by itself. A round is
counted in the very status write that raises `chargedRound` to it, a pod in the one that names its successor, so
neither is ever counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from elasticjob.contract.messages import Failure, FailureClass, RoundEnded
from elasticjob.contract.names import RoundId
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.raw import moment, objects
from elasticjob_operator.plan import failures
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pod_decisions import PodDecision, ReplacePod

MAX_RECENT_FAILURES = 10
"""How many failures status keeps."""


@dataclass(frozen=True)
class Budget:
    """Counters as status must show them next."""

    restarts: int
    counted: int
    charged_round: RoundId | None
    charged: tuple[dict[str, Any], ...] = ()
    """New failures that are charged, oldest first."""
    uncharged: tuple[dict[str, Any], ...] = ()
    """New ones that are not."""
    exhausted: bool = False
    """A failure came that the budget could not pay: the job has failed."""
    last_round: RoundEnded | None = None
    """The newest round that ended since the last status."""
    event_records: tuple[EventRecord, ...] = ()

    def charge(self, limit: int, record: dict[str, Any], note: EventRecord) -> Budget:
        """Pay for one failure."""
        spent = replace(self, charged=(*self.charged, record), event_records=(*self.event_records, note))
        if self.counted >= limit:
            return replace(spent, exhausted=True)
        return replace(spent, restarts=self.restarts + 1, counted=self.counted + 1)


def plan_budget(ctx: ReconcileContext, decisions: Iterable[PodDecision]) -> Budget:
    """Take every new ended round and every newly failed pod into account; what is not charged is told all the same."""
    status, decisions = ctx.status, tuple(decisions)
    untold = tuple(record for decision in decisions if (record := failures.uncharged_record(decision, ctx.now)))
    budget = Budget(status.restarts, status.restarts_counted, status.charged_round, uncharged=untold)
    budget = _tell_standstill(ctx, budget)
    for ended in _new_rounds(ctx):
        budget = _charge_round(ctx, budget, ended, decisions)
    for decision in decisions:
        if (
            isinstance(decision.action, ReplacePod)
            and decision.action.charged
            and decision.pod
            and not _covered(ctx, decision)
        ):
            record = failures.pod_record(decision.pod, ctx.now)
            note = EventRecord("WorkerFailed", failures.describe_record(record), key=decision.pod.name, warning=True)
            budget = budget.charge(ctx.spec.max_restarts, record, note)
    return budget


def _tell_standstill(ctx: ReconcileContext, budget: Budget) -> Budget:
    """A hang that ends nothing: told once for each standstill, whatever else came after it."""
    hang = ctx.report.stall if ctx.report else None
    if hang is None:
        return budget
    record = failures.worker_record(hang, ctx.node_of(hang.pod))
    name = ("time", "pod", "class")
    if any(all(known.get(n) == record[n] for n in name) for known in objects(ctx.status.raw, "recentFailures")):
        return budget
    message = f"{failures.describe_record(record)}; nothing is restarted: hangPolicy.action is Event"
    note = EventRecord("HangDetected", message, key=f"{hang.pod}/{hang.time:.3f}", warning=True)
    return replace(budget, uncharged=(*budget.uncharged, record), event_records=(*budget.event_records, note))


def _new_rounds(ctx: ReconcileContext) -> list[RoundEnded]:
    seen = ctx.status.charged_round
    ended = ctx.report.ended_rounds if ctx.report else ()
    return sorted((e for e in ended if seen is None or e.round > seen), key=lambda e: e.round)


def _charge_round(
    ctx: ReconcileContext, budget: Budget, ended: RoundEnded, decisions: tuple[PodDecision, ...]
) -> Budget:
    budget = replace(budget, charged_round=ended.round, last_round=ended)
    if not ended.charged or ended.failure is None or _excused(ended.failure, decisions):
        return budget
    record = failures.worker_record(ended.failure, ctx.node_of(ended.failure.pod))
    reason = "HangDetected" if ended.failure.kind is FailureClass.HANG else "WorkerFailed"
    note = EventRecord(reason, failures.describe_record(record), key=str(ended.round), warning=True)
    return budget.charge(ctx.spec.max_restarts, record, note)


def _excused(failure: Failure, decisions: tuple[PodDecision, ...]) -> bool:
    """What Kubernetes knows of pods by now withdraws a charge that is not persisted yet: a kill is excused where its
    pod was being taken away, the echo of a peer's end where any pod was. What a worker did itself is not.

    Only pods that have no successor yet: one that hangs on a dead node does not excuse what happens later.
    """
    taken = {s.pod.name for s in decisions if s.pod and (s.pod.disrupted or s.pod.deleting is not None or _lost(s))}
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return bool(taken)
    return failure.kind is FailureClass.KILLED and failure.pod in taken


def _lost(decision: PodDecision) -> bool:
    return isinstance(decision.action, ReplacePod) and decision.action.lost_at is not None


def _covered(ctx: ReconcileContext, decision: PodDecision) -> bool:
    """Pods that fail together are one failure: no world has formed since the last charge, and it was there then."""
    charged_at = moment(ctx.status.raw, "lastRestartTime") or 0.0
    return (
        charged_at > ctx.status.last_rendezvous and decision.pod is not None and decision.pod.created < int(charged_at)
    )
