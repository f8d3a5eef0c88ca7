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
from elasticjob_operator.plan.job_status.conditions import describe_avoidance, describe_world
from elasticjob_operator.plan.job_status.decisions import Decisions
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


def event_records(decisions: Decisions, conditions: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    """Return the Events that are not about a single pod or failure; `conditions` are those of the next status.

    Keys name what happened, so that a repeated reconcile records no second Event.
    """
    return (
        *suspension_event(decisions.inputs),
        *_world(decisions),
        *_warm_fork(decisions),
        *_no_steps(decisions),
        *_scale(decisions, conditions),
        *_avoided_nodes(decisions),
        *_noticed_nodes(decisions),
        *cordon_event(decisions.inputs),
        *_missing_nodes(decisions, conditions),
        *capacity_events(decisions.inputs, decisions.capacity),
        *stragglers.straggler_event(decisions),
    )


def _world(decisions: Decisions) -> tuple[EventRecord, ...]:
    if not (decisions.training.is_new_round and decisions.training.formed):
        return ()
    size, key = describe_world(decisions.training), str(decisions.training.rounds)
    formed = EventRecord("WorldFormed", f"round {decisions.training.rounds}: {size}", key=key)
    charged = decisions.budget.restarts != decisions.inputs.status.restarts or _was_charged(decisions)
    if not charged or decisions.inputs.spec.restart_strategy is RestartStrategy.RECREATE:
        return (formed,)
    return (formed, EventRecord("RestartedInPlace", f"restart {decisions.budget.restarts}: {size}", key=key))


def _was_charged(decisions: Decisions) -> bool:
    restarting = decisions.inputs.status.conditions.get(ConditionType.RESTARTING)
    return restarting is not None and restarting.true and restarting.reason in ("WorkerFailed", "HangDetected")


def _warm_fork(decisions: Decisions) -> tuple[EventRecord, ...]:
    # One Event per reason, however many nodes report it: the reason is the Event's key.
    before = text(decisions.inputs.status.raw, "warmFork")
    reason, known = (warm_fork.partition(": ")[2] for warm_fork in (decisions.training.warm_fork, before))
    if reason in ("", known):
        return ()
    message = f"workers start by exec, which makes every restart slower: {reason}"
    return (EventRecord("WarmForkOff", message, key=reason, warning=True),)


def _no_steps(decisions: Decisions) -> tuple[EventRecord, ...]:
    """Return a Warning if the job's hangPolicy has begun to have nothing to watch: a user relies on it."""
    guard, before = decisions.training.hang_guard, text(decisions.inputs.status.raw, "hangGuard")
    if not guard or guard == before or decisions.inputs.spec.progress_timeout <= 0:
        return ()
    return (EventRecord("NoStepsReported", guard, key=str(decisions.training.rounds), warning=True),)


def _scale(decisions: Decisions, conditions: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    before, target = decisions.inputs.status.target, decisions.inputs.spec.target
    key = str(decisions.inputs.job.generation)
    if decisions.suspended:
        return ()
    if before is not None and before != target:
        reason = "ScalingUp" if target > before else "ScalingDown"
        return (EventRecord(reason, f"scaling from {before} to {with_noun(target, 'pod')}", key),)
    last = decisions.inputs.status.conditions.get(ConditionType.FULLY_SCALED)
    scaled = conditions[ConditionType.FULLY_SCALED]
    if last is not None and not last.true and scaled.true and "lastScaleTime" in decisions.inputs.status.raw:
        return (EventRecord("Scaled", scaled.message, key),)
    return ()


def _avoided_nodes(decisions: Decisions) -> tuple[EventRecord, ...]:
    known = {(node.name, node.since) for node in decisions.inputs.status.avoided}
    return tuple(
        EventRecord(
            node.reason,
            f"{node.message}; new pods avoid {node.name} {describe_avoidance(node)}",
            key=f"{node.name}/{node.since:.0f}",
            warning=True,
        )
        for node in decisions.workers.avoided
        if (node.name, node.since) not in known
    )


def _noticed_nodes(decisions: Decisions) -> tuple[EventRecord, ...]:
    """Return one Event for each node that pods leave from now on because its end is announced."""
    deleted = {a.name for a in decisions.store.actions.actions if isinstance(a, DeletePod)}
    stores = [
        pod for pod in decisions.inputs.observed.stores if pod.name in deleted and decisions.inputs.should_leave(pod)
    ]
    replaced = [d.pod for d in decisions.pod_decisions if isinstance(d.action, ReplacePod) and d.action.noticed]
    left = {pod.node for pod in (*stores, *replaced) if pod is not None}
    return tuple(
        EventRecord(
            NODE_TERMINATING,
            f"{node} has the {decisions.inputs.nodes_to_leave[node]}: the job's pods leave it",
            key=f"{node}/{decisions.inputs.nodes_to_leave[node]}",
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


def _missing_nodes(decisions: Decisions, conditions: dict[ConditionType, Condition]) -> tuple[EventRecord, ...]:
    """Return the Event of a problem that keeps nodes away from now on.

    Pods that have ended have an Event of their own.
    """
    scaled, last = (
        conditions[ConditionType.FULLY_SCALED],
        decisions.inputs.status.conditions.get(ConditionType.FULLY_SCALED),
    )
    if scaled.reason not in _PROBLEMS or (scaled.reason == POD_START_FAILED and not is_waiting(scaled)):
        return ()
    if last is not None and last.reason == scaled.reason and is_waiting(last) == is_waiting(scaled):
        return ()
    return (EventRecord(scaled.reason, scaled.message, key=_PROBLEMS[scaled.reason], warning=True, repeats=True),)
