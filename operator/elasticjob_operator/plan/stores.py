"""The store pod: which incarnation serves, and when the operator confirms a store as the job's only one.

The operator replaces an unresponsive store quickly. If the old store was alive after all, little is lost: the nodes
reconnect to the new store and training does not notice. A store without the operator's confirmation starts no round
with half of the last round's nodes or fewer; the operator sends the confirmation only once the old store has certainly
ended or can run no round (docs/store-loss.md, "When a store is replaced").
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from elasticjob.contract.messages import Report
from elasticjob_operator.actions import Action, CreateStore, DeletePod, EventRecord
from elasticjob_operator.manifests.names import store_pod
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.status import AvoidedNode
from elasticjob_operator.plan.context import (
    LEASE_LATE_SECONDS,
    NODES_SWITCH_SECONDS,
    STORE_UNRESPONSIVE_SECONDS,
    Actions,
    ReconcileContext,
    poll_interval,
)
from elasticjob_operator.plan.operator_reach import may_replace
from elasticjob_operator.plan.pod_decisions import avoided_names

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
    """The node that was lost together with the last store."""
    lost_reason: str = ""
    """Why the last store was replaced; empty in a plan that replaces none."""


def plan_store(ctx: ReconcileContext) -> StorePlan:
    """Return the incarnation that should serve, and the actions for it.

    The operator waits for a store pod that is being deleted and still responds. It replaces an unresponsive one: the
    successor has the name, the Service and all links from then on, and the old pod is deleted like any other. The
    old pod's object disappears only once its container has ended.
    """
    current = ctx.status.store_incarnation
    if current is None:
        return _create(ctx, 0)
    pod = ctx.store_pod(current)
    actions = _delete_older(ctx, current)
    if pod is None:
        store = _plan_missing(ctx, current)
    elif pod.end is not None:
        actions += Actions((DeletePod(pod.name, pod.uid, "it has ended"),))
        store = _create(ctx, current + 1, f"{pod.name} ended: {pod.end.reason} {pod.end.message}".strip())
    else:
        store = _plan_live(ctx, current, pod)
    return replace(store, actions=actions + store.actions)


def current_store(ctx: ReconcileContext) -> StorePlan:
    """Return the store as it is, with no actions: for a job that gets no new store."""
    return StorePlan(ctx.status.store_incarnation, _serving(ctx.store_pod(ctx.status.store_incarnation)), Actions())


def _serving(pod: Pod | None) -> Pod | None:
    return pod if pod is not None and pod.running and pod.ip else None


def confirmable_request(report: Report, before: Report | None, *, older: bool, live: Collection[str]) -> float:
    """Return the request of the current store that the operator may confirm ("you are the only store"); else 0.

    `live`: worker pods that run, as far as their kubelets report. None of them may be one that can go on with an
    earlier round: more than half of a round's nodes write without a coordinator.

    `older`: an older store pod may still be alive, or nodes may still be on their way here from it. Then one case is
    safe: exactly half of the last round is missing here, and the older store holds no confirmation, without which it
    cannot continue with the other half. It holds none if its last report (`before`) names a round: a store asks only
    while it has no round, starting one uses the confirmation up, and the operator sends it no more. That round must not
    be newer than `report.half_missing_round`, or the older store has continued without the nodes that are here. The
    older store must be the direct predecessor, because the operator keeps no other's last report.
    """
    connected = {node.pod for node in report.nodes}
    may_write = set(live) - connected if report.pods_that_may_write is None else report.pods_that_may_write
    if not set(live).isdisjoint(may_write):
        return 0.0
    if not older:
        return report.confirmation_request
    if before is None or before.round is None or before.incarnation + 1 != report.incarnation:
        return 0.0
    if report.half_missing_round is None or before.round > report.half_missing_round:
        return 0.0
    return report.confirmation_request


def confirmed_request(ctx: ReconcileContext) -> float:
    """Return the request that the operator confirms to the current store (`OperatorView.confirmed_request`)."""
    if ctx.report is None:
        return 0.0
    return confirmable_request(
        ctx.report,
        ctx.observed.link.previous_report,
        older=ctx.now < ctx.observed.older_store_at + NODES_SWITCH_SECONDS,
        live=_live_workers(ctx),
    )


def _live_workers(ctx: ReconcileContext) -> frozenset[str]:
    """Return the worker pods that run, and those that end, as far as their kubelets report.

    A kubelet that is silent for LEASE_LATE_SECONDS reports nothing: its pods are taken for dead.
    """
    return frozenset(
        p.name for p in ctx.observed.workers if p.end is None and p.phase == "Running" and not ctx.lease_late(p.node)
    )


def _awaits_confirmation(ctx: ReconcileContext) -> bool:
    return ctx.report is not None and ctx.report.confirmation_request > 0 and not confirmed_request(ctx)


def _delete_older(ctx: ReconcileContext, current: int) -> Actions:
    """Delete stores that have a successor.

    One whose kubelet's lease is late is deleted by force once its successor has existed for LEASE_LATE_SECONDS. This
    exceeds CONFIRMATION_SECONDS, and must: the last confirmation that it got has expired by then. Nodes that only it
    can reach are cut off too; when they meet the new store they leave the old one.
    """
    older = [p for p in ctx.observed.stores if p.incarnation < current]
    successor = ctx.store_pod(current)
    waited = ctx.now - successor.seen if successor is not None else 0.0
    actions: list[Action] = []
    for pod in older:
        expired = successor is not None and ctx.now >= successor.seen + LEASE_LATE_SECONDS
        if pod.end is None and ctx.lease_late(pod.node) and expired:
            why = f"neither {pod.name} nor the kubelet of {pod.node} responds"
            actions.append(DeletePod(pod.name, pod.uid, why, force=True))
        elif pod.deleting is None:
            actions.append(DeletePod(pod.name, pod.uid, "a newer store serves"))
    return Actions(tuple(actions), requeue_at=(ctx.now + poll_interval(waited),) if older else ())


def _plan_missing(ctx: ReconcileContext, current: int) -> StorePlan:
    name = store_pod(ctx.job.name, current)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None:
        return _create(ctx, current + 1, f"{name} no longer exists")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return _create(ctx, current + 1)
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
    requeue_at: tuple[float, ...] = ()
    if _awaits_confirmation(ctx):
        switched = ctx.observed.older_store_at + NODES_SWITCH_SECONDS
        requeue_at += (switched if ctx.now < switched else ctx.now + LEASE_POLL_SECONDS,)
    if not ctx.observed.link.connected or pod.deleting is not None:
        requeue_at += (ctx.now + _seconds_to_decision(ctx, pod, silence),)
    return StorePlan(current, _serving(pod), Actions(requeue_at=requeue_at))


def _seconds_to_decision(ctx: ReconcileContext, pod: Pod, silence: float) -> float:
    """Return the seconds until the store may be replaced, at most a growing interval."""
    if silence < STORE_UNRESPONSIVE_SECONDS:
        left = STORE_UNRESPONSIVE_SECONDS - silence
    else:
        left = LEASE_LATE_SECONDS - (ctx.lease_age(pod.node) or 0.0)
    return left if 0.0 < left < LEASE_POLL_SECONDS else poll_interval(silence)


def _must_replace(ctx: ReconcileContext, pod: Pod, silence: float) -> bool:
    """Return whether the store must be replaced, after `silence` seconds without contact.

    A store that has reported to this operator and is Ready is replaced for its silence alone: if only this operator
    cannot reach it, little is lost. A store that has never reported may be unreachable from this operator for good:
    it is replaced only if the lease of its machine's kubelet is late too, or the operator would replace one store after
    the other. So is any store while the operator suspects its own network (`operator_reach`).
    """
    known_and_ready = ctx.report is not None and pod.running and pod.ready
    late = ctx.lease_late(pod.node)
    if pod.deleting is not None and ctx.kubelet_down(pod.node):
        return True
    if silence < STORE_UNRESPONSIVE_SECONDS or not (known_and_ready or late):
        return False
    # A store that refuses the link responds; its successor would refuse it too.
    return not ctx.observed.link.refused and may_replace(ctx.observed.reach, kubelet_late=late)


def _replace(ctx: ReconcileContext, current: int, pod: Pod) -> StorePlan:
    """Plan the successor, and delete the old pod unless that has begun.

    This is safe because status is written before any action, and the operator confirms only the store that status
    names.
    """
    why = f"{pod.name} does not respond"
    lost_node = AvoidedNode(pod.node, math.ceil(ctx.now), f"store {pod.name} on {pod.node} does not respond")
    store = _create(ctx, current + 1, why, lost_node)
    deletion = Actions((DeletePod(pod.name, pod.uid, why),) if pod.deleting is None else ())
    return replace(store, actions=store.actions + deletion)


def _create(ctx: ReconcileContext, incarnation: int, lost: str = "", lost_node: AvoidedNode | None = None) -> StorePlan:
    """Plan a new store pod. `lost` says why the last one is replaced; empty if there was none."""
    name = store_pod(ctx.job.name, incarnation)
    records = [EventRecord("RendezvousStoreCreated", f"created store pod {name}", key=name)]
    if lost:
        records.insert(0, EventRecord("StoreLost", f"{lost}; {name} replaces it", key=name, warning=True))
    avoid = tuple(sorted(avoided_names(ctx) | ({lost_node.name} if lost_node else set())))
    actions = Actions((CreateStore(name, incarnation, avoid),), tuple(records))
    return StorePlan(incarnation, None, actions, lost_node, lost_reason=lost)
