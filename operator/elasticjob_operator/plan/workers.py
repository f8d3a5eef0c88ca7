"""The future of worker pods: what the verdicts on slots come to, in status, facts and actions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticjob.contract.messages import PodFact, PodState
from elasticjob_operator.actions import CreateWorker, DeletePod, Note
from elasticjob_operator.manifests.names import worker_pod
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.status import LOST, UNFIT, AvoidedNode
from elasticjob_operator.plan.context import Context, Todo
from elasticjob_operator.plan.pod_decisions import Create, Keep, Replace, Slot, is_lost, still_avoided


@dataclass(frozen=True)
class Workers:
    """The slots' future: what status must say before it is done, and what to do."""

    incarnations: tuple[int, ...]
    avoided: tuple[AvoidedNode, ...]
    facts: tuple[PodFact, ...]
    todo: Todo


def plan_workers(ctx: Context, slots: tuple[Slot, ...], lost_node: AvoidedNode | None) -> Workers:
    """Carry out the verdicts: every slot's incarnation, the pods to make and the pods to delete.

    `lost_node` was lost with the store.
    """
    avoided = _avoided(ctx, slots, lost_node)
    away = tuple(sorted(node.name for node in avoided))
    incarnations = list(ctx.status.incarnations)
    facts, todo = [], Todo(wake=_wake(ctx, slots, avoided))
    for slot in slots:
        new = _next_incarnation(slot)
        incarnations[slot.index : slot.index + 1] = [_newest(slot, new)]
        if new is not None:
            name = worker_pod(ctx.job.name, slot.index, new)
            todo += Todo(actions=(CreateWorker(name, slot.index, new, away),), notes=_notes(slot, name))
            facts.append(PodFact(slot.index, new, name, PodState.STARTING))
        elif slot.pod is not None and slot.pod.end is None:
            facts.append(_on_lost_node(fact_of(slot.pod), slot.pod.node, avoided))
    current = {(index, incarnation) for index, incarnation in enumerate(incarnations[: ctx.spec.settings.slots])}
    going, leaving = _remove(ctx, current)
    return Workers(tuple(incarnations), avoided, (*facts, *leaving), todo + going)


def _next_incarnation(slot: Slot) -> int | None:
    if isinstance(slot.verdict, Create):
        return slot.verdict.incarnation
    if isinstance(slot.verdict, Replace):
        return (slot.incarnation or 0) + 1
    return None


def _newest(slot: Slot, new: int | None) -> int:
    return new if new is not None else slot.incarnation or 0


def _notes(slot: Slot, name: str) -> tuple[Note, ...]:
    if not isinstance(slot.verdict, Replace):
        return ()
    return (Note("PodReplaced", f"{slot.verdict.why}; {name} takes its place", key=name),)


def fact_of(pod: Pod) -> PodFact:
    """What the coordinator must know of a pod that has not ended."""
    if pod.deleting is not None:
        state = PodState.DRAINING
    elif pod.unschedulable or pod.image_error or pod.stuck:
        state = PodState.UNSCHEDULABLE
    else:
        state = PodState.RUNNING if pod.running else PodState.STARTING
    return PodFact(pod.index, pod.incarnation, pod.name, state)


def _on_lost_node(fact: PodFact, node: str, avoided: Iterable[AvoidedNode]) -> PodFact:
    """The API server calls a pod running for as long as nobody says otherwise."""
    lost = fact.state is PodState.RUNNING and is_lost(node, avoided)
    return replace(fact, state=PodState.LOST) if lost else fact


def _avoided(ctx: Context, slots: tuple[Slot, ...], lost_node: AvoidedNode | None) -> tuple[AvoidedNode, ...]:
    new = [lost_node, *(_avoided_by(ctx, slot) for slot in slots)]
    kept = {node.name: node for node in still_avoided(ctx)}
    for node in filter(None, new):
        # A lost kubelet may be back soon; that does not make its node fit.
        if node.reason == UNFIT or node.name not in kept or kept[node.name].reason == LOST:
            kept[node.name] = node
    return tuple(sorted(kept.values(), key=lambda node: node.since)[-32:])


def _avoided_by(ctx: Context, slot: Slot) -> AvoidedNode | None:
    """Times are written in whole seconds, and never before the loss."""
    if not isinstance(slot.verdict, Replace) or slot.pod is None or not slot.pod.node:
        return None
    if slot.verdict.unfit is not None:
        return AvoidedNode(slot.pod.node, math.ceil(ctx.now), slot.verdict.why, UNFIT, ctx.spec.avoid_node)
    if slot.verdict.lost_at is not None:
        return AvoidedNode(slot.pod.node, math.ceil(slot.verdict.lost_at), slot.verdict.why)
    return None


def _wake(ctx: Context, slots: tuple[Slot, ...], avoided: Iterable[AvoidedNode]) -> tuple[float, ...]:
    times = [s.verdict.until for s in slots if isinstance(s.verdict, Keep) and s.verdict.until is not None]
    # A lease is no doorbell: while a lost node is avoided, look whether it is back.
    return (*times, *(ctx.now + 5.0 for node in avoided if node.reason == LOST))


def _remove(ctx: Context, current: set[tuple[int, int]]) -> tuple[Todo, list[PodFact]]:
    """Delete pods that no slot wants. Of ended ones, the newest of each slot stays for its log."""
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
            actions.append(DeletePod(pod.name, pod.uid, "its slot has a newer pod or is not wanted", force=lost))
        if pod.index >= ctx.spec.settings.slots and pod.end is None:
            facts.append(replace(fact_of(pod), state=PodState.DRAINING))
    return Todo(tuple(actions), wake=tuple(wake)), facts
