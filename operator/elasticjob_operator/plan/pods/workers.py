"""From the decisions on pods: incarnations and avoided nodes for status, expected pods for the store, and actions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticjob._runtime.contract.messages import ExpectedPod, PodState
from elasticjob_operator.actions import Action, CreateWorker, DeletePod, EventRecord
from elasticjob_operator.manifests.names import worker_pod
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.spec import GangProvider
from elasticjob_operator.model.job.status import DEVICE_UNHEALTHY, AvoidedNode
from elasticjob_operator.plan.context import POLL_SECONDS, Actions, ReconcileContext, poll_interval
from elasticjob_operator.plan.pods.gang import plan_gang
from elasticjob_operator.plan.pods.pod_decisions import (
    AwaitEnd,
    CreatePod,
    KeepPod,
    PodDecision,
    ReplacePod,
    is_lost,
    still_avoided,
)
from elasticjob_operator.plan.pods.terminations import may_force, next_checks, pods_to_await

MAX_AVOIDED_NODES = 32
"""Number of avoided nodes, and of suspect ones, that status lists; the newest stay. It bounds the status, and how much
of a cluster one job can rule out for itself."""
MOVE_SECONDS = 60.0
"""Seconds for which a node is avoided on the first suspicion: the successor of its pod is placed elsewhere by then, if
there is room elsewhere."""


@dataclass(frozen=True)
class WorkersPlan:
    """What the decisions on pods lead to. Status must be written before the actions are executed."""

    incarnations: tuple[int, ...]
    """For each index ever used, the incarnation of its pod."""
    avoided: tuple[AvoidedNode, ...]
    suspects: tuple[AvoidedNode, ...]
    expected_pods: tuple[ExpectedPod, ...]
    actions: Actions
    withheld: frozenset[str] = frozenset()
    """Names of the pods that status names and that are created later (`AwaitEnd`)."""


def plan_workers(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], newly_avoided: Iterable[AvoidedNode]
) -> WorkersPlan:
    """Return the next incarnation of every index, the pods to create and the pods to delete.

    `newly_avoided`: the nodes that are avoided from now on for another reason than these decisions.
    """
    avoided = _avoided(ctx, decisions, newly_avoided)
    avoid = tuple(sorted({node.name for node in avoided} | ctx.nodes_to_leave.keys()))
    incarnations = list(ctx.status.incarnations)
    expected: list[ExpectedPod] = []
    withheld: set[str] = set()
    gang, has_gang = plan_gang(ctx, decisions), ctx.spec.gang is not GangProvider.NONE
    actions = Actions(requeue_at=_requeue_times(ctx, decisions, avoided))
    for decision in decisions:
        new = _next_incarnation(decision)
        incarnations[decision.index : decision.index + 1] = [decision.incarnation or 0 if new is None else new]
        if older := _older(ctx, decision, new):
            name = worker_pod(ctx.job.name, decision.index, incarnations[decision.index])
            withheld.add(name)
            actions += Actions((), _replacement_event(decision, name, " once it has ended"), next_checks(ctx, older))
            expected += [replace(expected_pod_of(p), state=PodState.DRAINING) for p in older[-1:] if p.end is None]
        elif new is not None and decision.index in gang.waiting:
            name = worker_pod(ctx.job.name, decision.index, new)
            withheld.add(name)
            # Without a pod, none was lost: an operator before this one has not created it yet.
            if decision.pod is not None:
                actions += Actions((), _replacement_event(decision, name, " once the gang has its Nodes"))
        elif new is not None:
            name = worker_pod(ctx.job.name, decision.index, new)
            create = CreateWorker(name, decision.index, new, avoid, has_gang and decision.index not in gang.joining)
            actions += Actions((create,), _replacement_event(decision, name))
            expected.append(ExpectedPod(decision.index, new, name, PodState.STARTING))
        elif decision.pod is not None and decision.pod.end is None:
            expected.append(_mark_lost(expected_pod_of(decision.pod), decision.pod.node, avoided))
    current = {(index, incarnations[index]) for index in ctx.indices}
    removal = _remove(ctx, current)
    suspects = _suspects(ctx, decisions, avoided)
    expected += _surplus(ctx)
    return WorkersPlan(tuple(incarnations), avoided, suspects, tuple(expected), actions + removal, frozenset(withheld))


def _older(ctx: ReconcileContext, decision: PodDecision, new: int | None) -> tuple[Pod, ...]:
    """Return the pods whose end the pod of this index waits for; `new` is the incarnation to create, if any."""
    if isinstance(decision.action, AwaitEnd):
        return decision.action.older
    return () if new is None else pods_to_await(ctx, decision.index)


def _next_incarnation(decision: PodDecision) -> int | None:
    """Return the incarnation of the pod to create; None if no pod is created."""
    if isinstance(decision.action, CreatePod):
        return decision.action.incarnation
    if isinstance(decision.action, ReplacePod):
        return (decision.incarnation or 0) + 1
    return None


def _replacement_event(decision: PodDecision, name: str, when: str = "") -> tuple[EventRecord, ...]:
    if not isinstance(decision.action, ReplacePod):
        return ()
    return (EventRecord("PodReplaced", f"{decision.action.reason}; {name} replaces it{when}", key=name),)


def expected_pod_of(pod: Pod) -> ExpectedPod:
    """Return what the coordinator must know of a pod that has not ended."""
    if pod.deleting is not None:
        state = PodState.DRAINING
    elif pod.unschedulable or pod.image_error or pod.stuck:
        state = PodState.UNSCHEDULABLE
    else:
        state = PodState.RUNNING if pod.running else PodState.STARTING
    return ExpectedPod(pod.index, pod.incarnation, pod.name, state)


def with_topology(ctx: ReconcileContext, pods: tuple[ExpectedPod, ...]) -> tuple[ExpectedPod, ...]:
    """Return the pods, each with the place of its Node. One that has just been created has no Node yet."""
    if not ctx.observed.topologies:
        return pods
    places = {pod.name: ctx.observed.topologies.get(pod.node, ()) for pod in ctx.observed.workers}
    return tuple(replace(pod, topology=places.get(pod.pod, ())) for pod in pods)


def _mark_lost(pod: ExpectedPod, node: str, avoided: Iterable[AvoidedNode]) -> ExpectedPod:
    """The API server reports a pod as running until its kubelet or the node controller reports otherwise."""
    lost = pod.state is PodState.RUNNING and is_lost(node, avoided)
    return replace(pod, state=PodState.LOST) if lost else pod


def draining_pods(ctx: ReconcileContext) -> tuple[ExpectedPod, ...]:
    """Return all live pods as draining: their workers are to end as planned."""
    live = (p for p in ctx.observed.workers if p.end is None)
    return tuple(replace(expected_pod_of(pod), state=PodState.DRAINING) for pod in live)


def _surplus(ctx: ReconcileContext) -> list[ExpectedPod]:
    """Return the pods whose index should have none, as draining."""
    return [pod for pod in draining_pods(ctx) if pod.index not in ctx.index_set]


def _avoided(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], newly_avoided: Iterable[AvoidedNode]
) -> tuple[AvoidedNode, ...]:
    kept = {node.name: node for node in still_avoided(ctx)}
    for node in (*newly_avoided, *filter(None, (_avoided_by(ctx, decision) for decision in decisions))):
        # The kubelet of a lost node may be back soon: a loss must not shorten the time of any other node.
        before = kept.get(node.name)
        if before is None or before.lost or (not node.lost and node.until > before.until):
            kept[node.name] = node
    return tuple(sorted(kept.values(), key=lambda node: node.since)[-MAX_AVOIDED_NODES:])


def _avoided_by(ctx: ReconcileContext, decision: PodDecision) -> AvoidedNode | None:
    """Return the node that must be avoided from now on because of this decision."""
    if not isinstance(decision.action, ReplacePod) or decision.pod is None or not decision.pod.node:
        return None
    # Status keeps whole seconds: rounding up keeps `since` from being before the loss.
    if (failure := decision.action.unhealthy) is not None:
        first = failure.suspected and not _is_suspect(ctx, decision.pod.node)
        seconds = min(MOVE_SECONDS, ctx.spec.avoid_node) if first else ctx.spec.avoid_node
        since = math.ceil(ctx.now)
        return AvoidedNode(decision.pod.node, since, decision.action.reason, DEVICE_UNHEALTHY, seconds)
    if decision.action.lost_at is not None:
        return AvoidedNode(decision.pod.node, math.ceil(decision.action.lost_at), decision.action.reason)
    return None


def _is_suspect(ctx: ReconcileContext, node: str) -> bool:
    """Return whether the job has moved away from the node before, on a suspicion that is not the present one.

    Several pods may report the present one: the node is avoided already when the second report comes.
    """
    known = any(s.name == node and ctx.now < s.until for s in ctx.status.suspects)
    return known and not any(n.name == node and n.reason == DEVICE_UNHEALTHY for n in still_avoided(ctx))


def _suspects(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], avoided: Iterable[AvoidedNode]
) -> tuple[AvoidedNode, ...]:
    """Return the nodes on which the next suspicion is not the first one."""
    since = {node.name: node.since for node in avoided if node.reason == DEVICE_UNHEALTHY}
    found = {node.name: node for node in ctx.status.suspects if ctx.now < node.until}
    for decision in decisions:
        pod, action = decision.pod, decision.action
        failure = action.unhealthy if isinstance(action, ReplacePod) else None
        if pod is not None and failure is not None and failure.suspected and pod.node in since:
            at, why = since[pod.node], failure.message
            found[pod.node] = AvoidedNode(pod.node, at, why, DEVICE_UNHEALTHY, ctx.spec.avoid_node)
    return tuple(sorted(found.values(), key=lambda node: node.since)[-MAX_AVOIDED_NODES:])


def _requeue_times(
    ctx: ReconcileContext, decisions: tuple[PodDecision, ...], avoided: Iterable[AvoidedNode]
) -> tuple[float, ...]:
    times = [d.action.until for d in decisions if isinstance(d.action, KeepPod) and d.action.until is not None]
    # The operator does not watch leases: while a lost node is avoided, it polls them.
    lost = [node.name for node in avoided if node.lost]
    # A pod that no other node has room for waits until then.
    times += [node.until for node in avoided if not node.lost]
    times += ctx.observed.start_warning_reads
    return (*times, *(ctx.observed.lease_reads.get(name, ctx.now + POLL_SECONDS) for name in lost))


def _remove(ctx: ReconcileContext, current: set[tuple[int, int]]) -> Actions:
    """Delete pods that are not `current` (index, incarnation). The newest ended pod of each index stays for its log,
    unless its successor waits until its sidecars have ended too."""
    newest_ended: dict[int, str] = {}
    for pod in sorted(ctx.observed.workers, key=lambda p: p.incarnation):
        if pod.end is not None and pod not in pods_to_await(ctx, pod.index):
            newest_ended[pod.index] = pod.uid
    actions: list[Action] = []
    requeue_at: list[float] = []
    for pod in ctx.observed.workers:
        unwanted = (pod.index, pod.incarnation) not in current
        force = unwanted and may_force(ctx, pod)
        if pod.deleting is not None:
            if force:
                actions.append(DeletePod(pod.name, pod.uid, "the kubelet of its Node is down", force=True))
            requeue_at.append(max(pod.deleting, ctx.now) + poll_interval(ctx.now - pod.deleting))
        elif unwanted and newest_ended.get(pod.index) != pod.uid:
            actions.append(DeletePod(pod.name, pod.uid, _why_removed(ctx, pod), force=force))
    return Actions(tuple(actions), requeue_at=tuple(requeue_at))


def _why_removed(ctx: ReconcileContext, pod: Pod) -> str:
    if pod.index in ctx.withdrawn:
        return "the cluster has no room for all pods of the job"
    return "a newer pod has its index" if pod.index in ctx.index_set else "the job needs fewer pods"
