"""The future of worker pods: what the verdicts on decisions come to, in status, facts and actions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticjob.contract.messages import ExpectedPod, PodState
from elasticjob_operator.actions import CreateWorker, DeletePod, EventRecord
from elasticjob_operator.manifests.names import worker_pod
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.status import DEVICE_UNHEALTHY, NODE_LOST, AvoidedNode
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.pod_decisions import CreatePod, KeepPod, PodDecision, ReplacePod, is_lost, still_avoided


@dataclass(frozen=True)
class WorkersPlan:
    """The decisions' future: what status must say before it is done, and what to do."""

    incarnations: tuple[int, ...]
    avoided: tuple[AvoidedNode, ...]
    expected_pods: tuple[ExpectedPod, ...]
    actions: Actions


def plan_workers(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], lost_node: AvoidedNode | None
) -> WorkersPlan:
    """Carry out the verdicts: every decision's incarnation, the pods to make and the pods to delete.

    `lost_node` was lost with the store.
    """
    avoided = _avoided(ctx, decisions, lost_node)
    away = tuple(sorted(node.name for node in avoided))
    incarnations = list(ctx.status.incarnations)
    facts, todo = [], Actions(requeue_at=_wake(ctx, decisions, avoided))
    for decision in decisions:
        new = _next_incarnation(decision)
        incarnations[decision.index : decision.index + 1] = [_newest(decision, new)]
        if new is not None:
            name = worker_pod(ctx.job.name, decision.index, new)
            todo += Actions(
                actions=(CreateWorker(name, decision.index, new, away),), event_records=_notes(decision, name)
            )
            facts.append(ExpectedPod(decision.index, new, name, PodState.STARTING))
        elif decision.pod is not None and decision.pod.end is None:
            facts.append(_on_lost_node(expected_pod_of(decision.pod), decision.pod.node, avoided))
    current = {(index, incarnation) for index, incarnation in enumerate(incarnations[: ctx.spec.settings.desired_pods])}
    going, leaving = _remove(ctx, current)
    return WorkersPlan(tuple(incarnations), avoided, (*facts, *leaving), todo + going)


def _next_incarnation(decision: PodDecision) -> int | None:
    if isinstance(decision.action, CreatePod):
        return decision.action.incarnation
    if isinstance(decision.action, ReplacePod):
        return (decision.incarnation or 0) + 1
    return None


def _newest(decision: PodDecision, new: int | None) -> int:
    return new if new is not None else decision.incarnation or 0


def _notes(decision: PodDecision, name: str) -> tuple[EventRecord, ...]:
    if not isinstance(decision.action, ReplacePod):
        return ()
    return (EventRecord("PodReplaced", f"{decision.action.reason}; {name} takes its place", key=name),)


def expected_pod_of(pod: Pod) -> ExpectedPod:
    """What the coordinator must know of a pod that has not ended."""
    if pod.deleting is not None:
        state = PodState.DRAINING
    elif pod.unschedulable or pod.image_error or pod.stuck:
        state = PodState.UNSCHEDULABLE
    else:
        state = PodState.RUNNING if pod.running else PodState.STARTING
    return ExpectedPod(pod.index, pod.incarnation, pod.name, state)


def _on_lost_node(fact: ExpectedPod, node: str, avoided: Iterable[AvoidedNode]) -> ExpectedPod:
    """The API server calls a pod running for as long as nobody says otherwise."""
    lost = fact.state is PodState.RUNNING and is_lost(node, avoided)
    return replace(fact, state=PodState.LOST) if lost else fact


def _avoided(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], lost_node: AvoidedNode | None
) -> tuple[AvoidedNode, ...]:
    new = [lost_node, *(_avoided_by(ctx, decision) for decision in decisions)]
    kept = {node.name: node for node in still_avoided(ctx)}
    for node in filter(None, new):
        # A lost kubelet may be back soon; that does not make its node fit.
        if node.reason == DEVICE_UNHEALTHY or node.name not in kept or kept[node.name].reason == NODE_LOST:
            kept[node.name] = node
    return tuple(sorted(kept.values(), key=lambda node: node.since)[-32:])


def _avoided_by(ctx: ReconcileContext, decision: PodDecision) -> AvoidedNode | None:
    """Times are written in whole seconds, and never before the loss."""
    if not isinstance(decision.action, ReplacePod) or decision.pod is None or not decision.pod.node:
        return None
    if decision.action.unhealthy is not None:
        return AvoidedNode(
            decision.pod.node, math.ceil(ctx.now), decision.action.reason, DEVICE_UNHEALTHY, ctx.spec.avoid_node
        )
    if decision.action.lost_at is not None:
        return AvoidedNode(decision.pod.node, math.ceil(decision.action.lost_at), decision.action.reason)
    return None


def _wake(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], avoided: Iterable[AvoidedNode]
) -> tuple[float, ...]:
    times = [s.action.until for s in decisions if isinstance(s.action, KeepPod) and s.action.until is not None]
    # A lease is no doorbell: while a lost node is avoided, look whether it is back.
    return (*times, *(ctx.now + 5.0 for node in avoided if node.reason == NODE_LOST))


def _remove(ctx: ReconcileContext, current: set[tuple[int, int]]) -> tuple[Actions, list[ExpectedPod]]:
    """Delete pods that no decision wants. Of ended ones, the newest of each decision stays for its log."""
    last_words = {}
    for pod in sorted(ctx.observed.workers, key=lambda p: p.incarnation):
        if pod.end is not None:
            last_words[pod.index] = pod.uid
    actions, facts, wake = [], [], []
    for pod in ctx.observed.workers:
        wanted = (pod.index, pod.incarnation) in current
        lost = wanted is False and ctx.kubelet_gone(pod.node)
        if pod.deleting is not None:
            if lost:
                actions.append(DeletePod(pod.name, pod.uid, "its node is gone", force=True))
            wake.append(max(pod.deleting, ctx.now) + 5.0)
        elif not wanted and last_words.get(pod.index) != pod.uid:
            actions.append(
                DeletePod(
                    pod.name, pod.uid, "a newer pod has its index, or the job does not want it any more", force=lost
                )
            )
        if pod.index >= ctx.spec.settings.desired_pods and pod.end is None:
            facts.append(replace(expected_pod_of(pod), state=PodState.DRAINING))
    return Actions(tuple(actions), requeue_at=tuple(wake)), facts
