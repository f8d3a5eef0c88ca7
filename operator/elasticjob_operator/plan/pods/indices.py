"""Which indices have a pod: when a job needs fewer pods, those that do no work go first.

An index is not a rank, so the indices may have gaps. A job that shrinks gives up pods without a Node first, then those
whose agent does not train, then the highest indices. An index below a pod that stays is then vacant: status names it,
so that the choice is made once, and the job takes it again before it takes a new one.

The coordinator counts every index up to the number of pods and spares as wanted, and has no list of vacant ones. So it
is sent more spares than the job has. It expects no pods for them, because its view does not list any.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from itertools import count, islice

from elasticjob._runtime.contract.messages import RoundPhase, RoundSettings
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pods.pod_decisions import is_lost, still_avoided


class PodUse(IntEnum):
    """What a pod is worth to its job; a smaller one goes first."""

    UNPLACED = 0
    """It does not exist, has ended, is being deleted, or is on no Node."""
    IDLE = 1
    """It is on a Node but cannot train: it is still starting, or its Node or its agent is lost."""
    READY = 2
    """It is connected and outside the running round."""
    TRAINING = 3


def with_vacant_indices(ctx: ReconcileContext) -> ReconcileContext:
    """Return the context with the indices that are vacant from now on. `ctx.vacant` are those of the last status."""
    before, wanted = _before(ctx), ctx.spec.settings.desired_pods
    if len(before) <= wanted:
        free = (index for index in count() if index not in before)
        kept = {*before, *islice(free, wanted - len(before))}
    else:
        kept = set(sorted(before, key=lambda index: _order(ctx, index))[:wanted])
    return replace(ctx, vacant=frozenset(range(max(kept, default=0))) - kept)


def _before(ctx: ReconcileContext) -> frozenset[int]:
    """Return the indices that may stay. A pod that the job was about to give up may stay too if it still runs."""
    missing = ctx.status.scaled_down.indices if ctx.status.scaled_down else frozenset()
    live = {pod.index for pod in ctx.observed.workers if pod.live and pod == _pod(ctx, pod.index)}
    used = {index for index in missing | live if index < len(ctx.status.incarnations)}
    return ctx.last_indices | (used - ctx.status.vacant)


def coordinator_settings(ctx: ReconcileContext) -> RoundSettings:
    """Return the job's settings as the coordinator needs them: with enough spares that it counts every index."""
    settings = ctx.spec.settings
    highest = max(ctx.all_indices, default=0)
    return replace(settings, spares=max(settings.spares, highest + 1 - settings.target))


def _order(ctx: ReconcileContext, index: int) -> tuple[int, bool, int]:
    """Return the sort key of an index of a job that shrinks: those that come last go.

    Among pods of equal use, one that has to leave its Node anyway goes first.
    """
    pod = _pod(ctx, index)
    return -pod_use(ctx, pod), pod is not None and ctx.should_leave(pod), index


def _pod(ctx: ReconcileContext, index: int) -> Pod | None:
    known = ctx.status.incarnations
    incarnation = known[index] if index < len(known) else None
    pods = ctx.workers_by_index.get(index, ())
    return next((pod for pod in pods if pod.incarnation == incarnation), None)


def pod_use(ctx: ReconcileContext, pod: Pod | None) -> PodUse:
    """Return what this pod does for the job, by the coordinator's last report and by what Kubernetes reports."""
    if pod is None or not pod.live or not pod.node:
        return PodUse.UNPLACED
    if pod.name in ctx.observed.link.lost_pods or is_lost(pod.node, still_avoided(ctx)):
        return PodUse.IDLE
    if ctx.report is None:
        return PodUse.READY if pod.ready else PodUse.IDLE
    agent = ctx.reported_agents.get(pod.name)
    if agent is None:
        return PodUse.IDLE
    trains = agent.member and ctx.report.phase is RoundPhase.RUNNING
    return PodUse.TRAINING if trains else PodUse.READY
