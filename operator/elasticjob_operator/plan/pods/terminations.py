"""Worker pods that are being deleted: how long the job waits for their end, and when the operator forces it.

Times are those of the operator's clock (`PodSightings`), from the end of the pod's grace period on.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.spec import PodReplacement
from elasticjob_operator.plan.context import ReconcileContext, poll_interval


def timeout_at(ctx: ReconcileContext, pod: Pod) -> float | None:
    """Return when the job stops waiting for the end of this pod, Unix seconds; None: never, or it is not deleted."""
    timeout = ctx.spec.termination_timeout
    return None if pod.deleting is None or timeout is None else pod.deleting + timeout


def timed_out(ctx: ReconcileContext, pod: Pod) -> bool:
    """Return whether the job waits no longer for the end of this pod."""
    at = timeout_at(ctx, pod)
    return at is not None and ctx.now >= at


def may_force(ctx: ReconcileContext, pod: Pod) -> bool:
    """Return whether the operator may delete this pod's object without its kubelet's confirmation: the kubelet is down.

    A node that is cut off may still run the pod. With podReplacementPolicy Failed the job waits for its end first,
    and without a time limit only Kubernetes decides that it has ended.
    """
    if ctx.spec.termination_timeout is None or not ctx.kubelet_down(pod.node):
        return False
    return ctx.spec.pod_replacement is PodReplacement.TERMINATING_OR_FAILED or timed_out(ctx, pod)


def is_stuck(ctx: ReconcileContext, pod: Pod) -> bool:
    """Return whether the pod is being deleted and no longer delays the end or the suspension of the job."""
    return pod.deleting is not None and (timed_out(ctx, pod) or may_force(ctx, pod))


def pods_to_await(ctx: ReconcileContext, index: int) -> tuple[Pod, ...]:
    """Return the pods of an index that must end before its next one is created; none unless the policy is Failed.

    A pod whose trainer has ended may have sidecars that run: its resources are not free.
    """
    if ctx.spec.pod_replacement is not PodReplacement.FAILED:
        return ()
    return tuple(p for p in ctx.workers_by_index.get(index, ()) if not p.finished and not timed_out(ctx, p))


def next_checks(ctx: ReconcileContext, pods: Iterable[Pod]) -> tuple[float, ...]:
    """Return when a job that waits for the end of these pods must be reconciled again, Unix seconds.

    The operator does not watch the kubelets: it polls them, more rarely with time.
    """
    pods = tuple(pods)
    if not pods:
        return ()
    waited = max((ctx.now - pod.deleting for pod in pods if pod.deleting is not None), default=0.0)
    timeouts = (at for pod in pods if (at := timeout_at(ctx, pod)) is not None and at > ctx.now)
    return (ctx.now + poll_interval(max(0.0, waited)), *timeouts)
