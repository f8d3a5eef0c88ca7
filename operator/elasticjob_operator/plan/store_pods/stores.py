"""The store pod: which incarnation serves, and what replaces it.

The operator replaces an unresponsive store quickly. If the old store was alive after all, little is lost: the agents
reconnect to the new store and training does not notice. A store without the operator's confirmation starts no round
with half of the last round's members or fewer (`store_confirmation`). The standby store is the successor if it can be
(`standby`), else a new pod (docs/contribute/store-loss.md, "When a store is replaced").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticjob_operator.actions import Action, CreateStore, DeletePod, EventRecord
from elasticjob_operator.manifests.names import store_pod
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.status import AvoidedNode
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.plan.context import (
    AGENTS_SWITCH_SECONDS,
    LEASE_LATE_SECONDS,
    STORE_LEFT_SECONDS,
    STORE_UNRESPONSIVE_SECONDS,
    Actions,
    ReconcileContext,
    poll_interval,
)
from elasticjob_operator.plan.pods.pod_decisions import avoided_names, was_never_created
from elasticjob_operator.plan.store_pods.operator_reach import may_replace
from elasticjob_operator.plan.store_pods.standby import (
    agents_have_left,
    can_promote,
    delete_store,
    has_taken_over,
    next_incarnation,
    plan_standby,
)
from elasticjob_operator.plan.store_pods.store_confirmation import awaits_confirmation

LEASE_POLL_SECONDS = 5.0
"""The operator does not watch the leases of kubelets: it reads those that matter this often."""


@dataclass(frozen=True)
class StorePlan:
    """The store that should serve, and the actions that lead to it."""

    incarnation: int | None
    """None if the job never had a store."""
    pod: Pod | None
    """The pod of this incarnation, to which the control link connects; None while it cannot serve."""
    actions: Actions
    lost_node: AvoidedNode | None = None
    """The Node that was lost together with the last store."""
    lost_reason: str = ""
    """Why the last store was replaced; empty in a plan that replaces none."""
    standby: int | None = None
    """Incarnation of the standby store; None for none."""
    promoted: bool = False
    """Whether the standby store has just become the store."""


def plan_store(ctx: ReconcileContext) -> StorePlan:
    """Return the incarnation that should serve, and the actions for it.

    The operator waits for a store pod that is being deleted and still responds. It replaces an unresponsive one: the
    successor has the name, the Service and all links from then on, and the old pod is deleted like any other. The
    old pod's object disappears only once its container has ended.
    """
    current = ctx.status.store_incarnation
    if current is None:  # the first store of an execution
        return _create(ctx, 0 if ctx.status.execution_attempts <= 1 else next_incarnation(ctx))
    pod = ctx.store_pod(current)
    actions = _delete_older(ctx, current)
    if has_taken_over(ctx):
        store = _promote(ctx, pod, f"the agents have left {store_pod(ctx.job.name, current)}", _silent_node(ctx, pod))
    elif pod is None:
        store = _plan_missing(ctx, current)
    elif pod.end is not None:
        actions += Actions((DeletePod(pod.name, pod.uid, "it has ended"),))
        store = _succeed(ctx, f"{pod.name} ended: {pod.end.reason} {pod.end.message}".strip())
    else:
        store = _plan_live(ctx, current, pod)
    if store.incarnation == current:
        standby, standby_actions = plan_standby(ctx)
        store = replace(store, standby=standby, actions=store.actions + standby_actions)
    return replace(store, actions=actions + store.actions)


def current_store(ctx: ReconcileContext) -> StorePlan:
    """Return the stores as they are, with no actions: for a job that gets no new store."""
    pod = _serving(ctx.store_pod(ctx.status.store_incarnation))
    return StorePlan(ctx.status.store_incarnation, pod, Actions(), standby=ctx.status.standby_store)


def no_store() -> StorePlan:
    """Return that the job has no store and gets none: it is suspended."""
    return StorePlan(None, None, Actions())


def _serving(pod: Pod | None) -> Pod | None:
    """Return the pod if it may serve. While it is being deleted it serves until its agents no longer need it."""
    return pod if pod is not None and pod.end is None and pod.phase == "Running" and pod.ip else None


def _delete_older(ctx: ReconcileContext, current: int) -> Actions:
    """Delete stores that have a successor.

    One whose kubelet's lease is late is deleted by force once its successor has existed, and has been named by status,
    for LEASE_LATE_SECONDS. This exceeds CONFIRMATION_SECONDS, and must: the last confirmation that it got has expired
    by then. Agents that only it can reach are cut off too; when they reach the new store they leave the old one.
    """
    older = [p for p in ctx.observed.stores if p.incarnation < current]
    successor = ctx.store_pod(current)
    # A successor that was a standby store existed long before status named it.
    since = ctx.now if successor is None else max(successor.seen, ctx.observed.store_named_at)
    actions: list[Action] = []
    for pod in older:
        expired = ctx.now >= since + LEASE_LATE_SECONDS
        if pod.end is None and ctx.lease_late(pod.node) and expired:
            why = f"neither {pod.name} nor the kubelet of {pod.node} responds"
            actions.append(DeletePod(pod.name, pod.uid, why, force=True))
        else:
            actions += delete_store(ctx, pod, "a newer store serves")
    return Actions(tuple(actions), requeue_at=(ctx.now + poll_interval(ctx.now - since),) if older else ())


def _plan_missing(ctx: ReconcileContext, current: int) -> StorePlan:
    name = store_pod(ctx.job.name, current)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None and was_never_created(ctx):
        return _create(ctx, next_incarnation(ctx))
    if refusal is None:
        return _succeed(ctx, f"{name} no longer exists")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return _create(ctx, next_incarnation(ctx))
    if ctx.now < refusal.retry_at:
        return StorePlan(current, None, Actions(requeue_at=(refusal.retry_at,)))
    return _create(ctx, current)


def _plan_live(ctx: ReconcileContext, current: int, pod: Pod) -> StorePlan:
    silence = 0.0 if ctx.observed.link.connected else ctx.now - ctx.observed.link.since
    if _must_replace(ctx, pod, silence):
        return _replace(ctx, current, pod)
    if pod.unschedulable and pod.avoided_nodes - avoided_names(ctx) and pod.deleting is None:
        why = f"it no longer needs to avoid {', '.join(sorted(pod.avoided_nodes))}"
        return StorePlan(current, None, Actions((DeletePod(pod.name, pod.uid, why),)))
    why = f"{pod.node} has the {ctx.nodes_to_leave[pod.node]}" if ctx.should_leave(pod) else ""
    # It serves until its agents know the standby store, as in a drain.
    actions = (DeletePod(pod.name, pod.uid, why),) if why else ()
    requeue_at: tuple[float, ...] = ()
    if awaits_confirmation(ctx):
        switched = max(ctx.observed.older_store_at, ctx.observed.standby_store_at) + AGENTS_SWITCH_SECONDS
        requeue_at += (switched if ctx.now < switched else ctx.now + LEASE_POLL_SECONDS,)
    if not ctx.observed.link.connected or pod.deleting is not None:
        requeue_at += (ctx.now + _seconds_to_decision(ctx, pod, silence),)
    return StorePlan(current, _serving(pod), Actions(actions, requeue_at=requeue_at))


def _seconds_to_decision(ctx: ReconcileContext, pod: Pod, silence: float) -> float:
    """Return the seconds until the store may be replaced, at most a growing interval."""
    patience = STORE_LEFT_SECONDS if agents_have_left(ctx) else STORE_UNRESPONSIVE_SECONDS
    left = patience - silence if silence < patience else LEASE_LATE_SECONDS - (ctx.lease_age(pod.node) or 0.0)
    return left if 0.0 < left < LEASE_POLL_SECONDS else poll_interval(silence)


def _must_replace(ctx: ReconcileContext, pod: Pod, silence: float) -> bool:
    """Return whether the store must be replaced, after `silence` seconds without contact.

    A store that has reported to this operator and is Ready is replaced for its silence alone: if only this operator
    cannot reach it, little is lost. A store that has never reported may be unreachable from this operator for good:
    it is replaced only if the lease of its Node's kubelet is late too, or the operator would replace one store after
    the other. The same holds for any store while the operator suspects its own network (`operator_reach`). If agents
    wait at the standby store, they have lost the store too: then STORE_LEFT_SECONDS of silence are enough.
    """
    known_and_ready = ctx.report is not None and _serving(pod) is not None and pod.ready
    late = ctx.lease_late(pod.node)
    if pod.deleting is not None and ctx.kubelet_down(pod.node):
        return True
    if ctx.observed.link.refused:
        return False  # a store that refuses the link responds; its successor would refuse it too
    if agents_have_left(ctx) and silence >= STORE_LEFT_SECONDS:
        return True
    if silence < STORE_UNRESPONSIVE_SECONDS or not (known_and_ready or late):
        return False
    return may_replace(ctx.observed.reach, kubelet_late=late)


def _promote(ctx: ReconcileContext, old: Pod | None, why: str, lost_node: AvoidedNode | None) -> StorePlan:
    """Plan that the standby store serves, and delete the old pod."""
    pod = ctx.newer_store
    assert pod is not None  # noqa: S101  # callers check it first
    record = EventRecord("StoreLost", f"{why}; standby store {pod.name} replaces it", key=pod.name, warning=True)
    actions = () if old is None else delete_store(ctx, old, why)
    # The next reconcile creates the next standby store.
    planned = Actions(actions, (record,), requeue_at=(ctx.now,))
    return StorePlan(pod.incarnation, _serving(pod), planned, lost_node, lost_reason=why, promoted=True)


def _silent_node(ctx: ReconcileContext, pod: Pod | None) -> AvoidedNode | None:
    """Return the Node of a store that does not respond though its kubelet calls it running: it may be lost too."""
    if pod is None or not pod.running or ctx.observed.link.connected:
        return None
    return AvoidedNode(pod.node, math.ceil(ctx.now), f"store {pod.name} on {pod.node} does not respond")


def _succeed(ctx: ReconcileContext, why: str) -> StorePlan:
    """Plan a successor for a store that is gone: the standby store, or a new one."""
    if can_promote(ctx):
        return _promote(ctx, None, why, None)
    return _create(ctx, next_incarnation(ctx), why)


def _replace(ctx: ReconcileContext, current: int, pod: Pod) -> StorePlan:
    """Plan the successor, and delete the old pod.

    This is safe because status is written before any action, and the operator confirms only the store that status
    names.
    """
    why = f"{pod.name} does not respond"
    lost_node = AvoidedNode(pod.node, math.ceil(ctx.now), f"store {pod.name} on {pod.node} does not respond")
    if can_promote(ctx):
        return _promote(ctx, pod, why, lost_node)
    store = _create(ctx, next_incarnation(ctx), why, lost_node)
    return replace(store, actions=store.actions + Actions(delete_store(ctx, pod, why)))


def _create(ctx: ReconcileContext, incarnation: int, lost: str = "", lost_node: AvoidedNode | None = None) -> StorePlan:
    """Plan a new store pod. `lost` says why the last one is replaced; empty if there was none."""
    name = store_pod(ctx.job.name, incarnation)
    records = [EventRecord("RendezvousStoreCreated", f"created store pod {name}", key=name)]
    if lost:
        records.insert(0, EventRecord("StoreLost", f"{lost}; {name} replaces it", key=name, warning=True))
    avoid = tuple(sorted(avoided_names(ctx) | ({lost_node.name} if lost_node else set())))
    actions = Actions((CreateStore(name, incarnation, avoid),), tuple(records))
    return StorePlan(incarnation, None, actions, lost_node, lost_reason=lost)
