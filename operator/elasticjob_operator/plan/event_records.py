"""Events: what changed between the status that was and the one that will be. Each is told once."""

from __future__ import annotations

from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.raw import text
from elasticjob_operator.model.status import Condition, ConditionType
from elasticjob_operator.plan import stragglers
from elasticjob_operator.plan.conditions import JobContext


def event_records(f: JobContext, told: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    """Events beyond those of single pods and failures. Keys name the happening, so that a retry tells it once."""
    return (
        *_world(f),
        *_warm_fork(f),
        *_scale(f, told),
        *_nodes(f),
        *_capacity(f, told),
        *stragglers.straggler_event(f),
    )


def _world(f: JobContext) -> tuple[EventRecord, ...]:
    if not (f.world.is_new_round and f.world.formed):
        return ()
    what = f"{f.world.active} nodes train with {f.world.size} workers"
    formed = EventRecord("WorldFormed", f"round {f.world.rounds}: {what}", key=str(f.world.rounds))
    if f.budget.restarts == f.ctx.status.restarts and not _was_charged(f):
        return (formed,)
    restarted = EventRecord("RestartedInPlace", f"restart {f.budget.restarts}: {what}", key=str(f.world.rounds))
    return (formed, restarted)


def _warm_fork(f: JobContext) -> tuple[EventRecord, ...]:
    """Told of each reason once: the Event has its name from it."""
    reason, known = (said.partition(": ")[2] for said in (f.world.warm_fork, text(f.ctx.status.raw, "warmFork")))
    if reason in ("", known):
        return ()
    message = f"workers start by exec, which is slower at every restart: {reason}"
    return (EventRecord("WarmForkOff", message, key=reason, warning=True),)


def _was_charged(f: JobContext) -> bool:
    restarted = f.ctx.status.conditions.get(ConditionType.RESTARTING)
    return restarted is not None and restarted.true and restarted.reason in ("WorkerFailed", "HangDetected")


def _scale(f: JobContext, told: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    before, target = f.ctx.status.target, f.ctx.spec.target
    key = f"{f.ctx.job.generation}"
    if before is not None and before != target:
        return (
            EventRecord("ScalingUp" if target > before else "ScalingDown", f"from {before} to {target} nodes", key),
        )
    was = f.ctx.status.conditions.get(ConditionType.FULLY_SCALED)
    scaled = told[ConditionType.FULLY_SCALED]
    if was is not None and not was.true and scaled.true and "lastScaleTime" in f.ctx.status.raw:
        return (EventRecord("Scaled", scaled.message, key),)
    return ()


def _nodes(f: JobContext) -> tuple[EventRecord, ...]:
    known = {(node.name, node.since) for node in f.ctx.status.avoided}
    return tuple(
        EventRecord(
            node.reason, f"{node.message}; new pods stay away from {node.name}", f"{node.name}/{node.since:.0f}", True
        )
        for node in f.workers.avoided
        if (node.name, node.since) not in known
    )


def _capacity(f: JobContext, told: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    now, was = told[ConditionType.FULLY_SCALED], f.ctx.status.conditions.get(ConditionType.FULLY_SCALED)
    if now.reason != "InsufficientCapacity" or (was is not None and was.reason == now.reason):
        return ()
    return (EventRecord("InsufficientCapacity", now.message, key="capacity", warning=True, repeats=True),)
