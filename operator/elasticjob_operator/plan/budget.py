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
from elasticjob_operator.actions import Note
from elasticjob_operator.model.raw import moment, objects
from elasticjob_operator.plan import failures
from elasticjob_operator.plan.context import Context
from elasticjob_operator.plan.pod_decisions import Replace, Slot

RECENT = 10
"""How many failures status keeps."""


@dataclass(frozen=True)
class Budget:
    """Counters as status must show them next."""

    restarts: int
    counted: int
    charged_round: RoundId | None
    failed: tuple[dict[str, Any], ...] = ()
    """New failures that are charged, oldest first."""
    untold: tuple[dict[str, Any], ...] = ()
    """New ones that are not."""
    exhausted: bool = False
    """A failure came that the budget could not pay: the job has failed."""
    last: RoundEnded | None = None
    """The newest round that ended since the last status."""
    notes: tuple[Note, ...] = ()

    def charge(self, limit: int, record: dict[str, Any], note: Note) -> Budget:
        """Pay for one failure."""
        spent = replace(self, failed=(*self.failed, record), notes=(*self.notes, note))
        if self.counted >= limit:
            return replace(spent, exhausted=True)
        return replace(spent, restarts=self.restarts + 1, counted=self.counted + 1)


def plan_budget(ctx: Context, slots: Iterable[Slot]) -> Budget:
    """Take every new ended round and every newly failed pod into account; what is not charged is told all the same."""
    status, slots = ctx.status, tuple(slots)
    untold = tuple(record for slot in slots if (record := failures.uncharged(slot, ctx.now)))
    budget = Budget(status.restarts, status.restarts_counted, status.charged_round, untold=untold)
    budget = _tell_standstill(ctx, budget)
    for ended in _new_rounds(ctx):
        budget = _charge_round(ctx, budget, ended, slots)
    for slot in slots:
        if isinstance(slot.verdict, Replace) and slot.verdict.charged and slot.pod and not _covered(ctx, slot):
            record = failures.from_pod(slot.pod, ctx.now)
            note = Note("WorkerFailed", failures.tell(record), key=slot.pod.name, warning=True)
            budget = budget.charge(ctx.spec.max_restarts, record, note)
    return budget


def _tell_standstill(ctx: Context, budget: Budget) -> Budget:
    """A hang that ends nothing: told once for each standstill, whatever else came after it."""
    hang = ctx.report.standstill if ctx.report else None
    if hang is None:
        return budget
    record = failures.from_worker(hang, ctx.node_of(hang.pod))
    name = ("time", "pod", "class")
    if any(all(known.get(n) == record[n] for n in name) for known in objects(ctx.status.raw, "recentFailures")):
        return budget
    message = f"{failures.tell(record)}; nothing is restarted: hangPolicy.action is Event"
    note = Note("HangDetected", message, key=f"{hang.pod}/{hang.time:.3f}", warning=True)
    return replace(budget, untold=(*budget.untold, record), notes=(*budget.notes, note))


def _new_rounds(ctx: Context) -> list[RoundEnded]:
    seen = ctx.status.charged_round
    ended = ctx.report.ended if ctx.report else ()
    return sorted((e for e in ended if seen is None or e.round > seen), key=lambda e: e.round)


def _charge_round(ctx: Context, budget: Budget, ended: RoundEnded, slots: tuple[Slot, ...]) -> Budget:
    budget = replace(budget, charged_round=ended.round, last=ended)
    if not ended.charged or ended.failure is None or _excused(ended.failure, slots):
        return budget
    record = failures.from_worker(ended.failure, ctx.node_of(ended.failure.pod))
    reason = "HangDetected" if ended.failure.kind is FailureClass.HANG else "WorkerFailed"
    note = Note(reason, failures.tell(record), key=str(ended.round), warning=True)
    return budget.charge(ctx.spec.max_restarts, record, note)


def _excused(failure: Failure, slots: tuple[Slot, ...]) -> bool:
    """What Kubernetes knows of pods by now withdraws a charge that is not persisted yet: a kill is excused where its
    pod was being taken away, the echo of a peer's end where any pod was. What a worker did itself is not.

    Only pods that have no successor yet: one that hangs on a dead node does not excuse what happens later.
    """
    taken = {s.pod.name for s in slots if s.pod and (s.pod.disrupted or s.pod.deleting is not None or _lost(s))}
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return bool(taken)
    return failure.kind is FailureClass.KILLED and failure.pod in taken


def _lost(slot: Slot) -> bool:
    return isinstance(slot.verdict, Replace) and slot.verdict.lost_at is not None


def _covered(ctx: Context, slot: Slot) -> bool:
    """Pods that fail together are one failure: no world has formed since the last charge, and it was there then."""
    charged_at = moment(ctx.status.raw, "lastRestartTime") or 0.0
    return charged_at > ctx.status.last_rendezvous and slot.pod is not None and slot.pod.created < int(charged_at)
