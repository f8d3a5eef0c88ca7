"""Events about changes between the last status and the next one, each recorded once."""

from __future__ import annotations

from elasticjob._runtime.contract.messages import RestartStrategy
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import DeletePod, EventRecord
from elasticjob_operator.model.cluster.raw import text
from elasticjob_operator.model.job.status import Condition, ConditionType
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.plan.failure_policy.failures import NODE_TERMINATING
from elasticjob_operator.plan.job_status import stragglers
from elasticjob_operator.plan.job_status.conditions import JobContext, describe_avoidance, describe_world
from elasticjob_operator.plan.life_cycle.suspension import suspension_event
from elasticjob_operator.plan.pods.capacity import capacity_events
from elasticjob_operator.plan.pods.cordons import cordon_event
from elasticjob_operator.plan.pods.pod_decisions import ReplacePod
from elasticjob_operator.plan.pods.start_problems import (
    IMAGE_PULL_FAILED,
    INSUFFICIENT_CAPACITY,
    POD_START_FAILED,
    UNSCHEDULABLE,
    is_waiting,
)


def event_records(job: JobContext, conditions: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    """Return the Events that are not about a single pod or failure; `conditions` are those of the next status.

    Keys name what happened, so that a repeated reconcile records no second Event.
    """
    return (
        *suspension_event(job.ctx),
        *_world(job),
        *_warm_fork(job),
        *_scale(job, conditions),
        *_avoided_nodes(job),
        *_noticed_nodes(job),
        *cordon_event(job.ctx),
        *_missing_nodes(job, conditions),
        *capacity_events(job.ctx, job.capacity),
        *stragglers.straggler_event(job),
    )


def _world(job: JobContext) -> tuple[EventRecord, ...]:
    if not (job.world.is_new_round and job.world.formed):
        return ()
    size, key = describe_world(job.world), str(job.world.rounds)
    formed = EventRecord("WorldFormed", f"round {job.world.rounds}: {size}", key=key)
    charged = job.budget.restarts != job.ctx.status.restarts or _was_charged(job)
    if not charged or job.ctx.spec.restart_strategy is RestartStrategy.RECREATE:
        return (formed,)
    return (formed, EventRecord("RestartedInPlace", f"restart {job.budget.restarts}: {size}", key=key))


def _was_charged(job: JobContext) -> bool:
    restarting = job.ctx.status.conditions.get(ConditionType.RESTARTING)
    return restarting is not None and restarting.true and restarting.reason in ("WorkerFailed", "HangDetected")


def _warm_fork(job: JobContext) -> tuple[EventRecord, ...]:
    # One Event per reason, however many nodes report it: the reason is the Event's key.
    before = text(job.ctx.status.raw, "warmFork")
    reason, known = (warm_fork.partition(": ")[2] for warm_fork in (job.world.warm_fork, before))
    if reason in ("", known):
        return ()
    message = f"workers start by exec, which makes every restart slower: {reason}"
    return (EventRecord("WarmForkOff", message, key=reason, warning=True),)


def _scale(job: JobContext, conditions: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    before, target = job.ctx.status.target, job.ctx.spec.target
    key = str(job.ctx.job.generation)
    if job.suspended:
        return ()
    if before is not None and before != target:
        reason = "ScalingUp" if target > before else "ScalingDown"
        return (EventRecord(reason, f"scaling from {before} to {with_noun(target, 'node')}", key),)
    last = job.ctx.status.conditions.get(ConditionType.FULLY_SCALED)
    scaled = conditions[ConditionType.FULLY_SCALED]
    if last is not None and not last.true and scaled.true and "lastScaleTime" in job.ctx.status.raw:
        return (EventRecord("Scaled", scaled.message, key),)
    return ()


def _avoided_nodes(job: JobContext) -> tuple[EventRecord, ...]:
    known = {(node.name, node.since) for node in job.ctx.status.avoided}
    return tuple(
        EventRecord(
            node.reason,
            f"{node.message}; new pods avoid {node.name} {describe_avoidance(node)}",
            key=f"{node.name}/{node.since:.0f}",
            warning=True,
        )
        for node in job.workers.avoided
        if (node.name, node.since) not in known
    )


def _noticed_nodes(job: JobContext) -> tuple[EventRecord, ...]:
    """Return one Event for each node that pods leave from now on because its end is announced."""
    deleted = {a.name for a in job.store.actions.actions if isinstance(a, DeletePod)}
    stores = [pod for pod in job.ctx.observed.stores if pod.name in deleted and job.ctx.should_leave(pod)]
    decisions = [d for d in job.pod_decisions if isinstance(d.action, ReplacePod) and d.action.noticed]
    left = {pod.node for pod in (*stores, *(d.pod for d in decisions)) if pod is not None}
    return tuple(
        EventRecord(
            NODE_TERMINATING,
            f"{node} has the {job.ctx.left_nodes[node]}: the job's pods leave it",
            key=f"{node}/{job.ctx.left_nodes[node]}",
            warning=True,
            repeats=True,
        )
        for node in sorted(left)
    )


_PROBLEMS = {
    INSUFFICIENT_CAPACITY: "capacity",
    UNSCHEDULABLE: "unschedulable",
    IMAGE_PULL_FAILED: "image",
    POD_START_FAILED: "container",
    RefusalReason.POD_CREATION_FAILED.value: "refused",
    RefusalReason.NAME_TAKEN.value: "name",
    RefusalReason.INVALID_SPEC.value: "spec",
}
"""Reasons of FullyScaled that are Events too, with their keys."""


def _missing_nodes(job: JobContext, conditions: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    """Return the Event of a problem that keeps nodes away from now on.

    Pods that have ended have an Event of their own.
    """
    scaled, last = conditions[ConditionType.FULLY_SCALED], job.ctx.status.conditions.get(ConditionType.FULLY_SCALED)
    if scaled.reason not in _PROBLEMS or (scaled.reason == POD_START_FAILED and not is_waiting(scaled)):
        return ()
    if last is not None and last.reason == scaled.reason and is_waiting(last) == is_waiting(scaled):
        return ()
    return (EventRecord(scaled.reason, scaled.message, key=_PROBLEMS[scaled.reason], warning=True, repeats=True),)
