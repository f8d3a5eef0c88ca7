"""The store pod: which incarnation serves, and when the operator confirms a store as the job's only one.

The operator replaces an unresponsive store quickly. If the old store was alive after all, little is lost: the nodes
reconnect to the new store and training does not notice. A store without the operator's confirmation starts no round
with half of the last round's nodes or fewer; the operator sends the confirmation only once the old store has certainly
ended or can run no round (docs/store-loss.md, "When a store is replaced").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticjob.contract.messages import Report, RoundPhase, StandbyStore
from elasticjob.contract.names import RoundId
from elasticjob_operator.actions import Action, CreateStandbyStore, CreateStore, DeletePod, EventRecord
from elasticjob_operator.manifests.names import store_pod
from elasticjob_operator.model.observed import RefusalReason, has_retired
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.status import AvoidedNode
from elasticjob_operator.plan.context import (
    LEASE_LATE_SECONDS,
    NODES_SWITCH_SECONDS,
    STORE_LEFT_SECONDS,
    STORE_UNRESPONSIVE_SECONDS,
    Actions,
    ReconcileContext,
)
from elasticjob_operator.plan.pod_decisions import avoided_names

LEASE_POLL_SECONDS = 5.0
"""The operator does not watch the leases of kubelets: it reads those that matter this often."""
STANDBY_SILENT_SECONDS = 5.0
"""Seconds without contact after which a standby store is replaced. It costs nothing while the store serves."""
STANDBY_MIN_LIFETIME = 60.0
"""Seconds after its creation before which it is not replaced for its silence alone: the operator may never reach it."""
SHORTEST_WAIT = 0.05
"""Seconds until the next reconcile at least."""


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
    if current is None:
        return _create(ctx, 0)
    pod = ctx.store_pod(current)
    actions = _delete_older(ctx, current)
    if ctx.standby_report is not None and ctx.standby_report.phase is not RoundPhase.STANDBY:
        store = _promote(ctx, pod, f"the nodes have left {store_pod(ctx.job.name, current)}", _silent_node(ctx, pod))
    elif pod is None:
        store = _plan_missing(ctx, current)
    elif pod.end is not None:
        actions += Actions((DeletePod(pod.name, pod.uid, "it has ended"),))
        store = _succeed(ctx, f"{pod.name} ended: {pod.end.reason} {pod.end.message}".strip())
    else:
        store = _plan_live(ctx, current, pod)
    if store.incarnation == current:
        store = plan_standby(ctx, store)
    return replace(store, actions=actions + store.actions)


def current_store(ctx: ReconcileContext) -> StorePlan:
    """Return the stores as they are, with no actions: for a job that gets no new store."""
    pod = _serving(ctx.store_pod(ctx.status.store_incarnation))
    return StorePlan(ctx.status.store_incarnation, pod, Actions(), standby=ctx.status.standby_store)


def _serving(pod: Pod | None) -> Pod | None:
    return pod if pod is not None and pod.running and pod.ip else None


def must_retire(report: Report) -> bool:
    """Return whether a standby store must be retired before the store with this report is confirmed.

    More than half of the last round is missing: it may go to the standby store, which then takes over by itself.
    """
    return report.confirmation_request > 0 and report.half_missing_round is None


def may_have_standby(report: Report) -> bool:
    """Return whether a standby store may be created beside the store with this report.

    A round runs, so the store holds no confirmation. With one it could continue without nodes that then make the new
    standby store active. The standby store receives this round, and takes over for it or a newer one only.
    """
    return formed_round(report) is not None and report.confirmation_request == 0 and report.outcome is None


def formed_round(report: Report | None) -> RoundId | None:
    """Return the report's round if all its workers have started, so that each of its nodes knows it; else None."""
    return report.round if report is not None and report.formed_at else None


def confirmable_request(report: Report, before: Report | None, *, older: bool, standby: bool = False) -> float:
    """Return the request of the current store that the operator may confirm ("you are the only store"); else 0.

    `standby`: a standby store may be active, or become so, unknown to the operator. It needs more than half of the last
    round, so the store may be confirmed if exactly half is missing there, as long as no more is
    (`OperatorView.confirmed_half`).

    `older`: an older store pod may still be alive, or nodes may still be on their way here from it. Then one case is
    safe: exactly half of the last round is missing here, and the older store holds no confirmation, without which it
    cannot continue with the other half. It holds none if its last report (`before`) names a round: a store asks only
    while it has no round, starting one uses the confirmation up, and the operator sends it no more. That round must not
    be newer than `report.half_missing_round`, or the older store has continued without the nodes that are here. The
    older store must be the direct predecessor, because the operator keeps no other's last report.
    """
    if standby and must_retire(report):
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
        standby=_standby_may_act(ctx),
    )


def _standby_may_act(ctx: ReconcileContext) -> bool:
    """Return whether a standby store may be active, or become so.

    Status names one; or one has not confirmed its retirement; or one has ended without that so recently that its nodes
    may be on their way here.
    """
    waiting = ctx.now < ctx.observed.standby_store_at + NODES_SWITCH_SECONDS
    retired = all(has_retired(p, ctx.observed.standby_link) for p in ctx.newer_stores)
    return ctx.status.standby_store is not None or waiting or not retired


def _awaits_confirmation(ctx: ReconcileContext) -> bool:
    return ctx.report is not None and ctx.report.confirmation_request > 0 and not confirmed_request(ctx)


def _delete_older(ctx: ReconcileContext, current: int) -> Actions:
    """Delete stores that have a successor.

    One whose kubelet's lease is late is deleted by force once its successor has served for LEASE_LATE_SECONDS, by this
    operator's link. This exceeds CONFIRMATION_SECONDS, and must: the last confirmation that it got has expired by then.
    Nodes that only it can reach are cut off too; when they meet the new store they leave the old one.
    """
    older = [p for p in ctx.observed.stores if p.incarnation < current]
    successor = ctx.store_pod(current)
    actions: list[Action] = []
    for pod in older:
        # A successor that was a standby store existed long before status named it.
        since = None if successor is None else max(successor.created, ctx.observed.link.since)
        expired = since is not None and ctx.now >= since + LEASE_LATE_SECONDS
        if pod.end is None and ctx.lease_late(pod.node) and expired:
            why = f"neither {pod.name} nor the kubelet of {pod.node} responds"
            actions.append(DeletePod(pod.name, pod.uid, why, force=True))
        elif pod.deleting is None:
            actions.append(DeletePod(pod.name, pod.uid, "a newer store serves"))
    return Actions(tuple(actions), requeue_at=(ctx.now + LEASE_POLL_SECONDS,) if older else ())


def _plan_missing(ctx: ReconcileContext, current: int) -> StorePlan:
    name = store_pod(ctx.job.name, current)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None:
        return _succeed(ctx, f"{name} no longer exists")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return _create(ctx, ctx.status.newest_store + 1)
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
        seen_at = max(ctx.observed.older_store_at, ctx.observed.standby_store_at)
        requeue_at += (max(seen_at + NODES_SWITCH_SECONDS, ctx.now + SHORTEST_WAIT),)
    if not ctx.observed.link.connected or pod.deleting is not None:
        requeue_at += (ctx.now + _seconds_to_decision(ctx, pod, silence),)
    return StorePlan(current, _serving(pod), Actions(requeue_at=requeue_at))


def _seconds_to_decision(ctx: ReconcileContext, pod: Pod, silence: float) -> float:
    """Return the seconds until the store may be replaced, at most LEASE_POLL_SECONDS."""
    left = _patience(ctx) - silence
    if left <= 0.0:
        left = LEASE_LATE_SECONDS - (ctx.lease_age(pod.node) or 0.0)
    return left if 0.0 < left < LEASE_POLL_SECONDS else LEASE_POLL_SECONDS


def _must_replace(ctx: ReconcileContext, pod: Pod, silence: float) -> bool:
    """Return whether the store must be replaced, after `silence` seconds without contact.

    A store that has reported to this operator and is Ready is replaced for its silence alone: if only this operator
    cannot reach it, little is lost. A store that has never reported may be unreachable from this operator for good:
    it is replaced only if the lease of its machine's kubelet is late too, or the operator would replace one store after
    the other.
    """
    known_and_ready = ctx.report is not None and pod.running and pod.ready
    kubelet_down = pod.deleting is not None and ctx.kubelet_down(pod.node)
    if _nodes_have_left(ctx) and silence >= STORE_LEFT_SECONDS:
        return True
    return kubelet_down or (silence >= STORE_UNRESPONSIVE_SECONDS and (known_and_ready or ctx.lease_late(pod.node)))


def _patience(ctx: ReconcileContext) -> float:
    """Return the seconds without contact after which the store may be replaced."""
    return STORE_LEFT_SECONDS if _nodes_have_left(ctx) else STORE_UNRESPONSIVE_SECONDS


def _nodes_have_left(ctx: ReconcileContext) -> bool:
    """Return whether nodes wait at the standby store: the operator is not the only one that has lost the store."""
    return _can_promote(ctx) and ctx.standby_report is not None and bool(ctx.standby_report.nodes)


def _can_promote(ctx: ReconcileContext) -> bool:
    """Return whether the standby store that status names is connected, so that the operator can activate it."""
    report, pod = ctx.standby_report, ctx.newer_store
    named = pod is not None and pod.incarnation == ctx.status.standby_store and pod.deleting is None
    return named and report is not None and not report.retired and ctx.observed.standby_link.connected


def _promote(ctx: ReconcileContext, old: Pod | None, why: str, lost_node: AvoidedNode | None) -> StorePlan:
    """Plan that the standby store serves, and delete the old pod unless that has begun."""
    pod = ctx.newer_store
    assert pod is not None  # noqa: S101  # callers check it first
    record = EventRecord("StoreLost", f"{why}; standby store {pod.name} replaces it", key=pod.name, warning=True)
    deleted = old is not None and old.deleting is None
    actions = (DeletePod(old.name, old.uid, why),) if old is not None and deleted else ()
    # The next reconcile creates the next standby store.
    planned = Actions(actions, (record,), requeue_at=(ctx.now + SHORTEST_WAIT,))
    return StorePlan(pod.incarnation, _serving(pod), planned, lost_node, lost_reason=why, promoted=True)


def _silent_node(ctx: ReconcileContext, pod: Pod | None) -> AvoidedNode | None:
    """Return the node of a store that does not respond though its kubelet calls it running: it may be lost too."""
    if pod is None or not pod.running or ctx.observed.link.connected:
        return None
    return AvoidedNode(pod.node, math.ceil(ctx.now), f"store {pod.name} on {pod.node} does not respond")


def _succeed(ctx: ReconcileContext, why: str) -> StorePlan:
    """Plan a successor for a store that is gone: the standby store, or a new one."""
    if _can_promote(ctx):
        return _promote(ctx, None, why, None)
    return _create(ctx, ctx.status.newest_store + 1, why)


# ---- the standby store


def plan_standby(ctx: ReconcileContext, store: StorePlan) -> StorePlan:
    """Return the plan with a standby store beside the store that serves: it is kept, retired or created."""
    standby = ctx.status.standby_store
    pod = ctx.store_pod(standby) if standby is not None else None
    name = store_pod(ctx.job.name, standby or 0)
    refusal = ctx.observed.refusals.get(name) if standby is not None else None
    actions = _delete_retired(ctx, None if _must_go(ctx, pod) else standby)
    if pod is None and refusal is not None and refusal.reason is not RefusalReason.NAME_TAKEN:
        retry = ctx.now >= refusal.retry_at and not _must_retire(ctx)
        actions += _create_standby(ctx, standby or 0) if retry else Actions(requeue_at=(refusal.retry_at,))
    elif pod is None or _must_go(ctx, pod):
        standby = ctx.status.newest_store + 1 if _may_create_standby(ctx) else None
        actions += _create_standby(ctx, standby) if standby is not None else Actions()
    elif not ctx.observed.standby_link.connected:
        actions += Actions(requeue_at=(ctx.now + LEASE_POLL_SECONDS,))
    if _must_retire(ctx):
        standby = None
    return replace(store, standby=standby, actions=store.actions + actions)


def _must_retire(ctx: ReconcileContext) -> bool:
    return ctx.report is not None and must_retire(ctx.report)


def _must_go(ctx: ReconcileContext, pod: Pod | None) -> bool:
    """Return whether the standby store's pod must be replaced: it has ended, does not respond, or must be retired.

    An operator that has lost the store as well does not go by silence.
    """
    if pod is None:
        return False
    link = ctx.observed.standby_link
    silent = pod.running and not link.connected and ctx.now >= link.since + STANDBY_SILENT_SECONDS
    known_lost = ctx.observed.link.connected and (
        ctx.lease_late(pod.node) or ctx.now >= pod.created + STANDBY_MIN_LIFETIME
    )
    return pod.end is not None or pod.deleting is not None or _must_retire(ctx) or (silent and known_lost)


def _may_create_standby(ctx: ReconcileContext) -> bool:
    """Return whether a standby store may be created now: no other newer store is alive, and a round runs.

    A job of one node needs none: without its node there is nothing to go on with, and else training does not notice.
    """
    if ctx.spec.settings.max_nodes == 1:
        return False
    known = ctx.report is not None and ctx.observed.link.connected and may_have_standby(ctx.report)
    return known and not ctx.newer_stores


def _create_standby(ctx: ReconcileContext, incarnation: int) -> Actions:
    name = store_pod(ctx.job.name, incarnation)
    return Actions((CreateStandbyStore(name, incarnation, tuple(sorted(avoided_names(ctx)))),))


def _delete_retired(ctx: ReconcileContext, standby: int | None) -> Actions:
    """Delete newer stores that are not the standby store; by force if the kubelet's lease is late by then."""
    unwanted = [p for p in ctx.observed.stores if p.incarnation > (ctx.status.store_incarnation or 0)]
    unwanted = [p for p in unwanted if p.incarnation != standby]
    actions: list[Action] = []
    for pod in unwanted:
        if pod.deleting is None:
            actions.append(DeletePod(pod.name, pod.uid, "it is not the standby store any more"))
        elif ctx.lease_late(pod.node) and ctx.now >= pod.deleting + LEASE_LATE_SECONDS:
            why = f"neither {pod.name} nor the kubelet of {pod.node} responds"
            actions.append(DeletePod(pod.name, pod.uid, why, force=True))
    return Actions(tuple(actions), requeue_at=(ctx.now + LEASE_POLL_SECONDS,) if unwanted else ())


def standby_store(ctx: ReconcileContext, store: StorePlan) -> StandbyStore | None:
    """Return the standby store that the nodes may use: it is passive, and has the operator's view."""
    pod, report = ctx.newer_store, ctx.standby_report
    if store.standby is None or store.promoted or pod is None or report is None or report.retired:
        return None
    usable = pod.incarnation == store.standby and ctx.observed.standby_link.connected
    return StandbyStore(pod.incarnation, pod.ip, ctx.spec.port) if usable and not _must_retire(ctx) else None


def _replace(ctx: ReconcileContext, current: int, pod: Pod) -> StorePlan:
    """Plan the successor, and delete the old pod unless that has begun.

    This is safe because status is written before any action, and the operator confirms only the store that status
    names.
    """
    why = f"{pod.name} does not respond"
    lost_node = AvoidedNode(pod.node, math.ceil(ctx.now), f"store {pod.name} on {pod.node} does not respond")
    if _can_promote(ctx):
        return _promote(ctx, pod, why, lost_node)
    store = _create(ctx, ctx.status.newest_store + 1, why, lost_node)
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
