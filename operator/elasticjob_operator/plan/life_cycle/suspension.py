"""Suspend a job and resume it. A job that its queue has not admitted is suspended too.

Suspending drains: the worker pods are deleted, and their workers have the time of a planned end to save. The store
serves until they have ended; then it goes, with the Services. A job that is resumed meanwhile is suspended completely
first, so that no execution finds pods of the one before. Each execution has its own keys, image and deadline. The
Secret of an earlier one stays until the job is deleted: the operator may not delete Secrets.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import DeletePod, EventRecord
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.status import Condition, ConditionType
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.life_cycle.job_end import all_workers_ended, delete_store_and_services
from elasticjob_operator.plan.life_cycle.queueing import (
    describe_eviction,
    describe_wait,
    has_left_queue,
    waits_for_queue,
)
from elasticjob_operator.plan.pods.terminations import may_force, next_checks

_WHY = "the job is suspended"
_CHANGED = "the job was suspended, changed and resumed at once, so its pods are replaced: "


def is_suspended(ctx: ReconcileContext) -> bool:
    """Return whether the job is suspended, or must be suspended completely before it may resume."""
    return _must_wait(ctx) or (_anything_left(ctx) if was_suspended(ctx) else has_changed(ctx))


def _must_wait(ctx: ReconcileContext) -> bool:
    """Return whether the user or the job's queue does not permit pods."""
    return ctx.spec.suspend or waits_for_queue(ctx)


def has_changed(ctx: ReconcileContext) -> bool:
    """Return whether the job says another thing than the pods of this execution are made from.

    The user suspended the job, changed it and resumed it before any operator saw it suspended. Pods of the new template
    must not join those of the old one, so the job is suspended now, and then resumes. The same for a job whose queue
    has changed: its pods use quota of the queue that it has left.
    """
    return _has_other_fields(ctx) or has_left_queue(ctx)


def _has_other_fields(ctx: ReconcileContext) -> bool:
    guarded = ctx.status.guarded
    if guarded is None or not guarded.comparable or guarded.execution != ctx.status.execution_attempts:
        return False
    return guarded.digest != ctx.job.guarded_digest


def resumes(ctx: ReconcileContext) -> bool:
    """Return whether the next execution begins with this reconcile. Its children come with the next one: they carry the
    number of the execution, which status must have first."""
    return not is_suspended(ctx) and was_suspended(ctx)


def was_suspended(ctx: ReconcileContext) -> bool:
    """Return whether the last status says that the job is suspended."""
    return ctx.status.is_true(ConditionType.SUSPENDED)


def stores_left(ctx: ReconcileContext) -> bool:
    """Return whether the suspended job still has a store."""
    return bool(ctx.observed.stores)


def _anything_left(ctx: ReconcileContext) -> bool:
    children = ctx.observed.children
    ours = [c for c in (children.nodes, children.rendezvous, children.gang) if c is not None and c.ours]
    return not all_workers_ended(ctx) or stores_left(ctx) or bool(ours)


def remove_children(ctx: ReconcileContext) -> Actions:
    """Delete the worker pods that have not ended, then the store and the other children."""
    live = [p for p in ctx.observed.workers if p.end is None]
    stores = list(ctx.observed.stores)
    down = [p for p in live if may_force(ctx, p)]
    drained = [p for p in live if p.deleting is None and p not in down]
    deletions = (*_forced(down), *(DeletePod(p.name, p.uid, _WHY) for p in drained))
    actions = Actions(deletions, requeue_at=next_checks(ctx, (*live, *stores)))
    if not all_workers_ended(ctx):
        return actions
    forced = _forced(p for p in stores if ctx.kubelet_down(p.node))
    return actions + delete_store_and_services(ctx, _WHY) + Actions(forced)


def _forced(pods: Iterable[Pod]) -> tuple[DeletePod, ...]:
    """Return the deletions by force of pods whose kubelet is down."""
    why = f"{_WHY}, and the kubelet of its Node is down"
    return tuple(DeletePod(p.name, p.uid, why, force=True) for p in pods)


def suspended_condition(ctx: ReconcileContext) -> Condition | None:
    """Return the condition Suspended; None for a job that was never suspended."""
    if is_suspended(ctx):
        reason = "SuspendedByUser"
        if not ctx.spec.suspend:
            reason = (
                "SuspendedByQueue" if waits_for_queue(ctx) else "SuspendedForChange" if has_changed(ctx) else reason
            )
        mistake = f"; the spec has a mistake to correct before: {ctx.job.spec_error}" if ctx.job.spec_error else ""
        return Condition("True", reason, _describe(ctx) + mistake)
    if ConditionType.SUSPENDED not in ctx.status.conditions:
        return None
    return Condition("False", "Resumed", "the job was resumed")


def _describe(ctx: ReconcileContext) -> str:
    live = sum(p.end is None for p in ctx.observed.workers)
    changed = "" if _must_wait(ctx) or not has_changed(ctx) else _why_changed(ctx)
    resume = "" if _must_wait(ctx) else "; the job then resumes"
    evicted = f"; {why}" if not ctx.spec.suspend and (why := describe_eviction(ctx)) else ""
    if live:
        left = f"{with_noun(live, 'pod')} still to end: workers have the time to save their state"
        return f"{changed}{left}{resume}{evicted}"
    if stores_left(ctx) or changed:
        return f"{changed}the store ends{resume}{evicted}"
    if ctx.spec.suspend or not ctx.job.queue:
        return "the job has no pods until spec.suspend is false"
    return describe_wait(ctx)


def _why_changed(ctx: ReconcileContext) -> str:
    if _has_other_fields(ctx):
        return _CHANGED
    left = ctx.status.guarded.queue if ctx.status.guarded is not None else ""
    return f"the job has left queue {left}, whose quota its pods use, so they are replaced: "


def suspension_event(ctx: ReconcileContext) -> tuple[EventRecord, ...]:
    """Return the Event of a job that is suspended or resumed now."""
    key = f"{ctx.job.generation}-{ctx.status.execution_attempts}"  # a queue may suspend it often
    if is_suspended(ctx) and not was_suspended(ctx):
        return (EventRecord("Suspended", _describe(ctx), key=key),)
    if not resumes(ctx):
        return ()
    return (EventRecord("Resumed", f"execution {ctx.status.execution_attempts + 1} begins", key=key),)
