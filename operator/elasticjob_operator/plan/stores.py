"""The store pod. A silent one has a successor soon, for whom it is nothing worse than a restart if it lived after all:
who is not told to be the only store gives no round to half of the nodes or fewer. That word waits until the old one has
surely ended, or can have no world."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticjob.contract.messages import Report
from elasticjob_operator.actions import CreateStore, DeletePod, EventRecord
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
)
from elasticjob_operator.plan.pod_decisions import avoided_names


@dataclass(frozen=True)
class StorePlan:
    incarnation: int | None
    """None: the job never had one."""
    pod: Pod | None
    """The pod of this incarnation that control links go to; None while there is none that could serve."""
    actions: Actions
    lost_node: AvoidedNode | None = None
    """The node that was lost with it."""
    lost_reason: str = ""
    """Why the last one is no more, in the plan that names its successor."""


def plan_store(ctx: ReconcileContext) -> StorePlan:
    """Which incarnation should serve, and what to do for it.

    A pod that is being deleted in good order is waited for. A store that is silent is given up: its successor has the
    name, the Service and all links from now on, and the old pod is deleted like any other. Its kubelet takes it from
    the API only once its container has ended.
    """
    current = ctx.status.store_incarnation
    if current is None:
        return _create(ctx, 0)
    pod = next((p for p in ctx.observed.stores if p.incarnation == current), None)
    going = _end_older(ctx, current)
    if pod is None:
        store = _absent(ctx, current)
    elif pod.end is not None:
        going += Actions((DeletePod(pod.name, pod.uid, "it has ended"),))
        store = _create(ctx, current + 1, f"{pod.name} ended: {pod.end.reason} {pod.end.message}".strip())
    else:
        store = _present(ctx, current, pod)
    return replace(store, actions=going + store.actions)


def confirmable_request(report: Report, before: Report | None, *, older: bool) -> float:
    """The question of the present store, if it is to hear that it is the job's only one; else 0.

    True once no older store is left, nor a node that is on its way from one. An older store may have a world of more
    than half of the last round; of half of it only by our word. A store whose last report (`before`) names a round has
    used what words it had, or let them go, and gets no more: where just half of that is here, the others can form none.
    """
    if not older:
        return report.confirmation_request
    if before is None or before.round is None or before.incarnation + 1 != report.incarnation:
        return 0.0
    return (
        report.confirmation_request
        if report.half_missing_round is not None and before.round <= report.half_missing_round
        else 0.0
    )


def confirmed_request(ctx: ReconcileContext) -> float:
    """What the present store is told (`Facts.only_store`)."""
    if ctx.report is None:
        return 0.0
    return confirmable_request(
        ctx.report,
        ctx.observed.link.previous_report,
        older=ctx.now < ctx.observed.older_store_at + NODES_SWITCH_SECONDS,
    )


def _asks_in_vain(ctx: ReconcileContext) -> bool:
    return ctx.report is not None and ctx.report.confirmation_request > 0 and not confirmed_request(ctx)


def _end_older(ctx: ReconcileContext, current: int) -> Actions:
    """Stores that have a successor. One whose kubelet is silent is gone by force after a time: our last word to it has
    run out then, and nodes that could still reach it are cut off like itself, and obey the higher incarnation."""
    older = [p for p in ctx.observed.stores if p.incarnation < current]
    newer = [p.created for p in ctx.observed.stores if p.incarnation == current]
    actions, wake = [], []
    for pod in older:
        late = (ctx.lease_age(pod.node) or 0.0) >= LEASE_LATE_SECONDS
        if pod.end is None and late and newer and ctx.now >= newer[0] + LEASE_LATE_SECONDS:
            why = f"neither {pod.name} nor the kubelet of {pod.node} is heard of"
            actions.append(DeletePod(pod.name, pod.uid, why, force=True))
        elif pod.deleting is None:
            actions.append(DeletePod(pod.name, pod.uid, "a newer store serves"))
        wake.append(ctx.now + 5.0)
    return Actions(tuple(actions), requeue_at=tuple(wake))


def _absent(ctx: ReconcileContext, current: int) -> StorePlan:
    name = store_pod(ctx.job.name, current)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None:
        return _create(ctx, current + 1, f"{name} is gone")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return _create(ctx, current + 1)
    if ctx.now < refusal.retry_at:
        return StorePlan(current, None, Actions(requeue_at=(refusal.retry_at,)))
    return _create(ctx, current)


def _present(ctx: ReconcileContext, current: int, pod: Pod) -> StorePlan:
    silent = 0.0 if ctx.observed.link.connected else ctx.now - ctx.observed.link.since
    if _given_up(ctx, pod, silent):
        return _succeed(ctx, current, pod)
    if pod.unschedulable and pod.avoided_nodes - avoided_names(ctx) and pod.deleting is None:
        why = f"it no longer needs to avoid {', '.join(sorted(pod.avoided_nodes))}"
        return StorePlan(current, None, Actions((DeletePod(pod.name, pod.uid, why),)))
    wake: tuple[float, ...] = (ctx.observed.older_store_at + NODES_SWITCH_SECONDS,) if _asks_in_vain(ctx) else ()
    if not ctx.observed.link.connected or pod.deleting is not None:
        wake += (ctx.now + _patience(ctx, pod, silent),)
    serving = pod if pod.running and pod.ip else None
    return StorePlan(current, serving, Actions(requeue_at=wake))


def _patience(ctx: ReconcileContext, pod: Pod, silent: float) -> float:
    """Seconds until it may be given up; a lease is no doorbell."""
    left = (
        STORE_UNRESPONSIVE_SECONDS - silent
        if silent < STORE_UNRESPONSIVE_SECONDS
        else LEASE_LATE_SECONDS - (ctx.lease_age(pod.node) or 0.0)
    )
    return left if 0.0 < left < 5.0 else 5.0


def _given_up(ctx: ReconcileContext, pod: Pod, silent: float) -> bool:
    """A store that we have heard needs no other sign: it may be silent to nobody but us, but then little is lost. One
    that we have not may have no way to us: it would have one successor after the other."""
    heard = ctx.report is not None and pod.running and pod.ready
    late = bool(pod.node) and (ctx.lease_age(pod.node) or 0.0) >= LEASE_LATE_SECONDS
    gone = pod.deleting is not None and ctx.kubelet_gone(pod.node)
    return gone or (silent >= STORE_UNRESPONSIVE_SECONDS and (heard or late))


def _succeed(ctx: ReconcileContext, current: int, pod: Pod) -> StorePlan:
    """Status names the successor before anything is done: a word to the old one is never given after this."""
    why = f"{pod.name} is silent"
    lost = AvoidedNode(pod.node, math.ceil(ctx.now), f"{pod.name}, which was there, is silent")
    store = _create(ctx, current + 1, why, lost)
    return replace(
        store, actions=store.actions + Actions((DeletePod(pod.name, pod.uid, why),) if pod.deleting is None else ())
    )


def _create(ctx: ReconcileContext, incarnation: int, lost: str = "", lost_node: AvoidedNode | None = None) -> StorePlan:
    name = store_pod(ctx.job.name, incarnation)
    notes = [EventRecord("RendezvousStoreCreated", f"store {name} created", key=name)]
    if lost:
        notes.insert(0, EventRecord("StoreLost", f"{lost}; {name} takes its place", key=name, warning=True))
    away = tuple(sorted(avoided_names(ctx) | ({lost_node.name} if lost_node else set())))
    todo = Actions((CreateStore(name, incarnation, away),), tuple(notes))
    return StorePlan(incarnation, None, todo, lost_node, lost_reason=lost)
