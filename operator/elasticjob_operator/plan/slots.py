"""Worker pods: what each slot has, what it needs. Level-triggered: an answer depends on what is there now.

A slot's pod is the one with the incarnation that status names; older ones are dead to the job. A pod that is gone,
ended, lost or being deleted has a successor at once, under the next incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticjob.contract.messages import Outcome, PodFact, PodState
from elasticjob.contract.names import ExitCode
from elasticjob_operator.actions import CreateWorker, DeletePod, Note
from elasticjob_operator.manifests.names import worker_pod
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.model.pods import End, Pod
from elasticjob_operator.model.status import AVOID_SECONDS, AvoidedNode
from elasticjob_operator.plan.context import LEASE_LATE, LEASE_STALE, LOST_GRACE, Context, Todo

UNCHARGED_EXITS = (ExitCode.LEFT, ExitCode.SUPERSEDED, ExitCode.UNAVAILABLE, ExitCode.JOIN_TIMEOUT)
"""The node was told to go, or the job had no place for it: no failure of the pod's own. What a coordinator judged
(exit code 1) is known by the termination message: any program that breaks may end with 1."""
SHORTEST_LIFE = 10.0
"""Seconds from a pod's creation before which it is not replaced, where it ended through no failure of its own."""
UNCHARGED_OUTCOMES = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.LEFT, Outcome.SUPERSEDED)


@dataclass(frozen=True)
class Keep:
    """Nothing to do before `until`, if that is set."""

    until: float | None = None


@dataclass(frozen=True)
class Create:
    """The pod of this incarnation was never made."""

    incarnation: int


@dataclass(frozen=True)
class Replace:
    """The slot needs a new pod. `charged`: the old one failed by itself."""

    why: str
    charged: bool = False
    lost_at: float | None = None
    """When its node was lost with it."""


@dataclass(frozen=True)
class Slot:
    index: int
    incarnation: int | None
    """None: the slot has never been used."""
    pod: Pod | None
    verdict: Keep | Create | Replace


def judge_slots(ctx: Context) -> tuple[Slot, ...]:
    """A verdict for each slot that the job should have."""
    pods = {(p.index, p.incarnation): p for p in ctx.observed.workers}
    slots = []
    for index in range(ctx.spec.target):
        known = ctx.status.incarnations
        incarnation = known[index] if index < len(known) else None
        pod = None if incarnation is None else pods.get((index, incarnation))
        slots.append(Slot(index, incarnation, pod, _judge(ctx, index, incarnation, pod)))
    return tuple(slots)


def _judge(ctx: Context, index: int, incarnation: int | None, pod: Pod | None) -> Keep | Create | Replace:
    if incarnation is None:
        return Create(0)
    if pod is None:
        return _judge_absent(ctx, index, incarnation)
    if pod.deleting is not None:
        return Replace(f"{pod.name} is being deleted")
    if pod.end is not None:
        return _judge_end(ctx, pod)
    if pod.unschedulable and pod.avoids - avoided_names(ctx):
        return Replace(f"{pod.name} no longer needs to avoid {', '.join(sorted(pod.avoids))}")
    return _judge_node(ctx, pod)


def _judge_absent(ctx: Context, index: int, incarnation: int) -> Keep | Create | Replace:
    name = worker_pod(ctx.job.name, index, incarnation)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None:
        return Replace(f"{name} is gone")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return Replace(f"the name {name} belongs to a pod of somebody else")
    return Create(incarnation) if ctx.now >= refusal.retry_at else Keep(refusal.retry_at)


def _judge_end(ctx: Context, pod: Pod) -> Keep | Replace:
    """The budget bounds failures; patience bounds other ends: a node may turn pods away as fast as they come."""
    charged = is_own_failure(pod)
    if not charged and ctx.now < pod.created + SHORTEST_LIFE:
        return Keep(pod.created + SHORTEST_LIFE)
    return Replace(f"{pod.name} ended: {describe_end(pod)}", charged)


def _judge_node(ctx: Context, pod: Pod) -> Keep | Replace:
    """A pod that Kubernetes calls fine may be on a node that is gone."""
    link = ctx.observed.link
    if pod.node in avoided_names(ctx) and not pod.running:
        return Replace(f"{pod.name} was to start on {pod.node}, which is lost")
    since = link.lost.get(pod.name)
    if link.connected and since is not None:
        if ctx.now >= since + LOST_GRACE:
            return Replace(f"the agent of {pod.name} on {pod.node} is lost", lost_at=since)
        return Keep(since + LOST_GRACE)
    if pod in unheard(ctx):
        age = ctx.lease_age(pod.node)
        if age is not None and age >= LEASE_LATE:
            return Replace(f"neither {pod.name} nor the kubelet of {pod.node} is heard of", lost_at=ctx.now)
        return Keep(ctx.now + LOST_GRACE)
    return Keep()


def unheard(ctx: Context) -> tuple[Pod, ...]:
    """Running pods that the store, which we can hear, does not hear."""
    if ctx.report is None or not ctx.observed.link.connected:
        return ()
    here = {node.pod for node in ctx.report.nodes}
    return tuple(p for p in ctx.observed.workers if p.running and p.name not in here)


def is_own_failure(pod: Pod) -> bool:
    """Whether an ended pod counts as a restart. What its coordinator has judged, or Kubernetes did to it, does not."""
    end = pod.end
    if end is None or pod.deleting is not None or pod.disrupted or end.exit_code is None:
        return False
    return end.exit_code not in UNCHARGED_EXITS and end.outcome not in UNCHARGED_OUTCOMES


def describe_end(pod: Pod) -> str:
    """For people."""
    end = pod.end or End(None, "", "", 0.0)
    if pod.disrupted:
        return f"disrupted ({pod.disrupted})"
    if end.termination is not None:
        return f"{end.termination.outcome.value} ({end.termination.reason})"
    if end.exit_code is None:
        return f"{end.reason} {end.message}".strip()
    code = end.signal or f"exit code {end.exit_code}"
    return f"{end.reason}, {code}" if end.reason not in ("", "Error") else code


def avoided_names(ctx: Context) -> frozenset[str]:
    """Nodes that are avoided now, by what status and leases say."""
    return frozenset(node.name for node in still_avoided(ctx))


def still_avoided(ctx: Context) -> tuple[AvoidedNode, ...]:
    """A node is avoided until its kubelet has renewed its lease after the loss."""
    return tuple(
        node
        for node in ctx.status.avoided
        if ctx.observed.leases.get(node.name, 0.0) <= node.lost_at and ctx.now < node.lost_at + AVOID_SECONDS
    )


# ---- what follows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workers:
    """The slots' future: what status must say before it is done, and what to do."""

    incarnations: tuple[int, ...]
    avoided: tuple[AvoidedNode, ...]
    facts: tuple[PodFact, ...]
    todo: Todo


def plan_workers(ctx: Context, slots: tuple[Slot, ...]) -> Workers:
    """Carry out the verdicts: every slot's incarnation, the pods to make and the pods to delete."""
    avoided = _avoided(ctx, slots)
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
            facts.append(fact_of(slot.pod))
    current = {(index, incarnation) for index, incarnation in enumerate(incarnations[: ctx.spec.target])}
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


def _avoided(ctx: Context, slots: tuple[Slot, ...]) -> tuple[AvoidedNode, ...]:
    kept = {node.name: node for node in still_avoided(ctx)}
    for slot in slots:
        if isinstance(slot.verdict, Replace) and slot.verdict.lost_at is not None and slot.pod and slot.pod.node:
            # Written in whole seconds, and never before the loss.
            kept[slot.pod.node] = AvoidedNode(slot.pod.node, math.ceil(slot.verdict.lost_at), slot.verdict.why)
    return tuple(sorted(kept.values(), key=lambda node: node.lost_at)[-32:])


def _wake(ctx: Context, slots: tuple[Slot, ...], avoided: Iterable[AvoidedNode]) -> tuple[float, ...]:
    times = [s.verdict.until for s in slots if isinstance(s.verdict, Keep) and s.verdict.until is not None]
    # A lease is no doorbell: while a node is avoided, look whether it is back.
    return (*times, *(ctx.now + 5.0 for _ in avoided))


def _remove(ctx: Context, current: set[tuple[int, int]]) -> tuple[Todo, list[PodFact]]:
    """Delete pods that no slot wants. Of ended ones, the newest of each slot stays for its log."""
    last_words = {}
    for pod in sorted(ctx.observed.workers, key=lambda p: p.incarnation):
        if pod.end is not None:
            last_words[pod.index] = pod.uid
    actions, facts, wake = [], [], []
    for pod in ctx.observed.workers:
        wanted = (pod.index, pod.incarnation) in current
        lost = wanted is False and _kubelet_gone(ctx, pod)
        if pod.deleting is not None:
            if pod.deleting < ctx.now and lost:
                actions.append(DeletePod(pod.name, pod.uid, "its node is gone", force=True))
            wake.append(max(pod.deleting, ctx.now) + 5.0)
        elif not wanted and last_words.get(pod.index) != pod.uid:
            actions.append(DeletePod(pod.name, pod.uid, "its slot has a newer pod or is not wanted", force=lost))
        if pod.index >= ctx.spec.target and pod.end is None:
            facts.append(replace(fact_of(pod), state=PodState.DRAINING))
    return Todo(tuple(actions), wake=tuple(wake)), facts


def _kubelet_gone(ctx: Context, pod: Pod) -> bool:
    age = ctx.lease_age(pod.node)
    return age is not None and age >= LEASE_STALE
