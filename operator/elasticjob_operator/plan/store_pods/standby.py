"""The standby store, as the operator plans it: created while a round runs, offered to the agents, retired, replaced.

It takes over from the store by itself, or because status names it (`stores`): docs/contribute/store-loss.md,
"The standby store".
"""

from __future__ import annotations

from elasticjob._runtime.contract.messages import Report, RoundPhase, StandbyStore
from elasticjob_operator.actions import Action, CreateStandbyStore, DeletePod
from elasticjob_operator.manifests.names import store_pod
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.observed import Refusal, RefusalReason
from elasticjob_operator.plan.context import (
    LEASE_LATE_SECONDS,
    STORE_GRACE_SECONDS,
    Actions,
    ReconcileContext,
    poll_interval,
)
from elasticjob_operator.plan.pods.pod_decisions import avoided_names
from elasticjob_operator.plan.store_pods.store_confirmation import live_workers, must_retire

STANDBY_SILENT_SECONDS = 5.0
"""Seconds without contact after which a standby store is replaced. It costs nothing while the store serves."""
STANDBY_MIN_LIFETIME = 60.0
"""Seconds, from when the operator first saw it running, for which it is not replaced for its silence alone: the
operator may never reach it."""


# ---- may it become the store?


def has_taken_over(ctx: ReconcileContext) -> bool:
    """Return whether the standby store has become active by itself: more than half of the agents have moved to it."""
    return ctx.standby_report is not None and ctx.standby_report.phase is not RoundPhase.STANDBY


def can_promote(ctx: ReconcileContext) -> bool:
    """Return whether the standby store that status names is connected, so that the operator can activate it."""
    report, pod = ctx.standby_report, ctx.newer_store
    named = pod is not None and pod.incarnation == ctx.status.standby_store and pod.deleting is None
    return named and report is not None and not report.retired and ctx.observed.standby_link.connected


def agents_have_left(ctx: ReconcileContext) -> bool:
    """Return whether agents wait at the standby store: the operator is not the only one that has lost the store."""
    return can_promote(ctx) and ctx.standby_report is not None and bool(ctx.standby_report.nodes)


def next_incarnation(ctx: ReconcileContext) -> int:
    """Return the incarnation of a new store pod: one that no pod of the job has had."""
    standby, refusal = ctx.status.standby_store, _refusal(ctx)
    if standby is not None and refusal is not None and ctx.store_pod(standby) is None:
        return standby  # the API server has never created that pod
    return ctx.status.newest_store + 1


def _refusal(ctx: ReconcileContext) -> Refusal | None:
    """Return why the API server did not create the standby store that status names; None if it may have."""
    if ctx.status.standby_store is None:
        return None
    refusal = ctx.observed.refusals.get(store_pod(ctx.job.name, ctx.status.standby_store))
    return None if refusal is not None and refusal.reason is RefusalReason.NAME_TAKEN else refusal


# ---- while a store serves


def plan_standby(ctx: ReconcileContext) -> tuple[int | None, Actions]:
    """Return the standby store of the store that serves, and the actions that create, retire or replace it."""
    standby, retire = ctx.status.standby_store, _must_retire(ctx)
    pod = ctx.store_pod(standby) if standby is not None else None
    refusal = _refusal(ctx)
    actions = _delete_retired(ctx, None if _must_go(ctx, pod) else standby)
    if pod is None and standby is not None and refusal is not None:
        retry = ctx.now >= refusal.retry_at and not retire
        actions += _create_standby(ctx, standby) if retry else Actions(requeue_at=(refusal.retry_at,))
    elif pod is None or _must_go(ctx, pod):
        standby = next_incarnation(ctx) if _may_create_standby(ctx) else None
        actions += _create_standby(ctx, standby) if standby is not None else Actions()
    elif pod.running and not ctx.observed.standby_link.connected:
        actions += Actions(requeue_at=(ctx.now + poll_interval(ctx.now - ctx.observed.standby_link.since),))
    if retire and ctx.status.standby_store is not None:
        # The next reconcile may confirm the store, if status names no standby store any more.
        actions += Actions(requeue_at=(ctx.now,))
    return None if retire else standby, actions


def _must_retire(ctx: ReconcileContext) -> bool:
    return ctx.report is not None and must_retire(ctx.report, live_workers(ctx))


def _must_go(ctx: ReconcileContext, pod: Pod | None) -> bool:
    """Return whether the standby store's pod must be replaced: it has ended, does not respond, must be retired, or the
    end of its node is announced or asked for.

    An operator that has lost the store as well does not go by silence.
    """
    if pod is None:
        return False
    link = ctx.observed.standby_link
    silent = pod.running and not link.connected and ctx.now >= link.since + STANDBY_SILENT_SECONDS
    known_lost = ctx.observed.link.connected and (
        ctx.lease_late(pod.node) or ctx.now >= pod.seen_running + STANDBY_MIN_LIFETIME
    )
    ends = pod.end is not None or pod.deleting is not None or ctx.should_leave(pod)
    return ends or _must_retire(ctx) or (silent and known_lost)


def may_have_standby(report: Report) -> bool:
    """Return whether the store with this report may get a standby store now.

    A round runs whose workers have all started, so the store holds no confirmation. With one it could continue without
    agents that then make the new standby store active. The standby store receives this round, and takes over for it or
    a newer one only.
    """
    formed = report.round is not None and report.formed_at > 0
    return formed and report.confirmation_request == 0 and report.outcome is None


def _may_create_standby(ctx: ReconcileContext) -> bool:
    """Return whether a standby store may be created now: no other newer store is alive, and a round runs.

    A job with one worker pod needs none: if that pod is lost there is nothing to continue, and if only the store is
    lost training does not notice.
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
    waited = 0.0
    for pod in unwanted:
        actions += delete_store(ctx, pod, "it is not the standby store any more")
        if pod.deleting is None:
            continue
        waited = max(waited, ctx.now - pod.deleting)
        if ctx.lease_late(pod.node) and ctx.now >= pod.deleting + LEASE_LATE_SECONDS:
            why = f"neither {pod.name} nor the kubelet of {pod.node} responds"
            actions.append(DeletePod(pod.name, pod.uid, why, force=True))
    return Actions(tuple(actions), requeue_at=(ctx.now + poll_interval(waited),) if unwanted else ())


def delete_store(ctx: ReconcileContext, pod: Pod, why: str) -> tuple[DeletePod, ...]:
    """Return the deletion of a store that is not the job's store any more; none if it ends as soon without it."""
    ends_soon = pod.deleting is not None and pod.deleting <= ctx.now + STORE_GRACE_SECONDS
    return () if ends_soon else (DeletePod(pod.name, pod.uid, why, grace=STORE_GRACE_SECONDS),)


def usable_standby_store(ctx: ReconcileContext, standby: int | None) -> StandbyStore | None:
    """Return the standby store that agents may use: it is passive, and has the operator's view.

    `standby`: the one that the next status names.
    """
    pod, report = ctx.newer_store, ctx.standby_report
    if standby is None or pod is None or report is None or report.retired:
        return None
    usable = pod.incarnation == standby and ctx.observed.standby_link.connected
    return StandbyStore(pod.incarnation, pod.ip, ctx.spec.port) if usable else None
