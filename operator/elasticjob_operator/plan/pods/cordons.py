"""Standby pods for those on nodes that are cordoned or to be drained, in a job that has no pod to spare.

A pod that an Eviction asks to leave counts as one on such a node.

A drain evicts the pods of a cordoned node. The PodDisruptionBudget of a job at its minimum lets no pod go, so the job
starts one more pod for each of its pods on cordoned nodes. Once that one is ready the budget lets a pod go, and the
drain ends. The job keeps the additional pods until its own are ready elsewhere, or no node is cordoned any more.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.plan.context import ReconcileContext

MAX_CORDON_SPARES = 8
"""Pods that a job starts for those on cordoned nodes. With fewer of them than pods, a drain takes several turns."""


def with_cordon_spares(ctx: ReconcileContext) -> ReconcileContext:
    """Return the context in which `spec.spares` includes the pods for those on cordoned nodes."""
    spares = _cordon_spares(ctx)
    if not spares:
        return ctx
    return replace(ctx, spec=replace(ctx.spec, spares=ctx.spec.spares + spares), cordon_spares=spares)


def _cordon_spares(ctx: ReconcileContext) -> int:
    """Return the number of additional pods. It grows to the number of pods on cordoned nodes, and shrinks only as own
    pods are ready elsewhere: neither a pod that fails nor time is a reason for another. Nodes that are cordoned one
    after the other are drained so too."""
    spec, status = ctx.spec, ctx.status
    may_have = may_have_cordon_spares(ctx)
    if (
        may_have is False
        or not spec.disruption_budget
        or spec.suspend
        or spec.settings.desired_pods > spec.min_replicas
    ):
        return 0
    if status.outcome_declared or status.scaled_down is not None or status.back_off is not None:
        return 0
    if may_have is None:
        return status.cordon_spares
    own = [pod for pod in ctx.current_pods if pod.live]
    cordoned = [pod for pod in own if is_cordoned(ctx, pod)]
    settled = [pod for pod in own if pod.name in ctx.ready_pods and pod not in cordoned]
    missing = spec.settings.desired_pods - len(settled)
    return min(MAX_CORDON_SPARES, max(status.cordon_spares, len(cordoned)), missing)


def may_have_cordon_spares(ctx: ReconcileContext) -> bool | None:
    """Return whether the job may start additional pods; None: a new operator does not know yet.

    A job with a queue has the pods that its queue has admitted.
    """
    return False if ctx.job.queue else ctx.observed.nodes_watched


def is_cordoned(ctx: ReconcileContext, pod: Pod) -> bool:
    """Return whether the pod's node is cordoned or to be drained, or the pod is to be evicted. A node whose end is
    announced is none to wait for."""
    warning = ctx.observed.warnings.get(pod.node)
    if warning is not None and warning.notice:
        return False
    drained = warning is not None and (warning.cordoned or ctx.should_leave(pod))
    return drained or pod.uid in ctx.evictions


def pods_not_ready(ctx: ReconcileContext) -> int:
    """Return how many pods the job should have, additional ones included, that are not ready to train."""
    ready = [pod for pod in ctx.current_pods if pod.live and pod.name in ctx.ready_pods]
    return len(ctx.indices) - len(ready)


def cordon_event(ctx: ReconcileContext) -> tuple[EventRecord, ...]:
    """Return the Event of additional pods that the job starts now."""
    if ctx.cordon_spares <= ctx.status.cordon_spares:
        return ()
    cordoned = [pod for pod in ctx.current_pods if pod.live and is_cordoned(ctx, pod)]
    nodes = sorted({pod.node for pod in cordoned if pod.uid not in ctx.evictions})
    asked = sorted(pod.name for pod in cordoned if pod.uid in ctx.evictions)
    drains = [f"pods are on nodes that are cordoned or to be drained ({', '.join(nodes)})"] if nodes else []
    evictions = [f"pods are asked to leave ({', '.join(asked)})"] if asked else []
    number = with_noun(ctx.cordon_spares, "standby pod")
    why = "so that these nodes can be drained" if nodes else "so that these pods can leave"
    message = f"{', and '.join(drains + evictions)}: the job has {number} more, {why}"
    return (EventRecord("NodeCordoned", message, key=",".join(nodes + asked), repeats=True),)


def describe_cordon_spares(ctx: ReconcileContext) -> str:
    """Return how many of the spares are additional pods, as an addition to their number; empty if none are."""
    return f" ({ctx.cordon_spares} added, so that cordoned Nodes can be drained)" if ctx.cordon_spares else ""
