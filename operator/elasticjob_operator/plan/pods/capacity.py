"""What the job does while the cluster has no room for all of its pods.

Above its minimum the job trains with the pods that have room. After `elasticPolicy.faultyScaleDownSeconds` the operator
stops asking for the missing pods (they are "withdrawn") and keeps only the one with the lowest index pending: the
scheduler places it as soon as there is room again, and its watch event makes the operator ask for the others. Below its
minimum, after `waitForMinSeconds`, the job gives all pods back and tries again after a delay that grows with each
attempt and differs between jobs, so that two jobs do not hold each other's Nodes. Status says which pods are withdrawn;
`spec` is never written.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from elasticjob._runtime.contract.messages import allowed_size
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.manifests.names import worker_pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.job.status import BackOff, ScaledDown
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.training_state import TrainingState

FIRST_BACK_OFF = 10.0
"""Seconds until a job that gave its pods back asks for them again; each further time in a row doubles it. The jitter
adds up to as much again."""
LONGEST_BACK_OFF = 300.0
"""The same at most, without the jitter."""


@dataclass(frozen=True)
class Capacity:
    """The pods that the job does without, and until when."""

    scaled_down: ScaledDown | None = None
    back_off: BackOff | None = None
    withdrawn: frozenset[int] = frozenset()
    """The indices that have no pod for now."""
    retry_at: float | None = None
    """When the job asks again for the pods that it has given back, Unix seconds; None: it has not given them back."""
    requeue_at: tuple[float, ...] = ()


def unchanged_capacity(ctx: ReconcileContext) -> Capacity:
    """Return what status says, for a job that has ended: it asks for no pods again."""
    return Capacity(ctx.status.scaled_down, None, ctx.status.withdrawn)


def plan_capacity(ctx: ReconcileContext, training: TrainingState) -> Capacity:
    """Return which pods are withdrawn. `ctx.withdrawn` is not set yet: this sets it."""
    back_off = _plan_back_off(ctx, training)
    if back_off is not None and back_off.since is not None:
        retry_at = _retry_at(ctx, back_off, back_off.since)
        return Capacity(None, back_off, frozenset(ctx.all_indices), retry_at, (retry_at,))
    scaled_down = _plan_scale_down(ctx, training)
    withdrawn = scaled_down.withdrawn if scaled_down else frozenset()
    requeue_at = (*_scale_down_times(ctx, training, scaled_down), *_back_off_times(ctx, training))
    return Capacity(scaled_down, back_off, withdrawn, requeue_at=tuple(at for at in requeue_at if at > ctx.now))


def target_replicas(ctx: ReconcileContext, capacity: Capacity) -> int:
    """Return `status.targetReplicas`: the spec's target, or the number of pods that the cluster has room for."""
    spec, missing = ctx.spec, capacity.scaled_down
    if missing is None:
        return spec.target
    room = min(spec.target, max(spec.min_replicas, spec.settings.desired_pods - len(missing.indices)))
    return allowed_size(room, spec.min_replicas, spec.increment)


def capacity_events(ctx: ReconcileContext, capacity: Capacity) -> tuple[EventRecord, ...]:
    """Return the Event of a target that is lowered now, or of pods that are given back now."""
    scaled, back_off = capacity.scaled_down, capacity.back_off
    if capacity.retry_at is not None and back_off is not None and back_off != ctx.status.back_off:
        return (_warning(describe_back_off(ctx, capacity), f"back-off {back_off.attempts}"),)
    if scaled is not None and scaled != ctx.status.scaled_down:
        message = f"no Node for {with_noun(len(scaled.indices), 'pod')} after {ctx.spec.faulty_scale_down} s"
        lowered = f"status.targetReplicas is {target_replicas(ctx, capacity)} until the cluster has room"
        return (_warning(f"{message}: {lowered}", f"scaled-down {sorted(scaled.indices)}"),)
    return ()


def _warning(message: str, key: str) -> EventRecord:
    return EventRecord("InsufficientCapacity", message, key=key, warning=True, repeats=True)


def describe_back_off(ctx: ReconcileContext, capacity: Capacity) -> str:
    """Return why the job has no pods, and when it tries again."""
    low = with_noun(ctx.spec.min_replicas, "pod")
    retry = timestamp(math.ceil(max(capacity.retry_at or ctx.now, ctx.now)))
    attempts = capacity.back_off.attempts if capacity.back_off else 0
    return (
        f"the cluster had no room for at least {low} for {ctx.spec.wait_for_min} s, so the job has given its pods back "
        f"({with_noun(attempts, 'time')} in a row). The operator tries again at {retry}"
    )


# ---- which pods have no room


def _without_room(ctx: ReconcileContext) -> dict[int, float]:
    """Return the indices whose pods have no room, each with the time since when, on the operator's clock.

    A scheduled pod has room, even if it does not run yet.
    """
    pods = {pod.index: pod for pod in ctx.current_pods}
    found: dict[int, float] = {}
    known = ctx.status.incarnations
    for index in (index for index in ctx.all_indices if index < len(known)):
        pod, incarnation = pods.get(index), known[index]
        refusal = ctx.observed.refusals.get(worker_pod(ctx.job.name, index, incarnation))
        if refusal is not None and refusal.reason is RefusalReason.QUOTA_EXCEEDED and not refusal.skipped:
            found[index] = refusal.since
        elif pod is not None and pod.live and pod.unschedulable and not pod.node:
            found[index] = pod.seen
    return found


# ---- above the minimum


def _plan_scale_down(ctx: ReconcileContext, training: TrainingState) -> ScaledDown | None:
    """Return the pods without room; None while there are none, and once the cluster has room for one of them."""
    missing = _still_missing(ctx, training)
    if _is_short(ctx, training):
        limit = ctx.spec.faulty_scale_down
        missing |= {index for index, since in _without_room(ctx).items() if ctx.now >= since + limit}
    return ScaledDown(ctx.spec.target, missing) if missing else None


def _is_short(ctx: ReconcileContext, training: TrainingState) -> bool:
    return training.formed and ctx.spec.min_replicas <= training.active < ctx.spec.target


def _still_missing(ctx: ReconcileContext, training: TrainingState) -> frozenset[int]:
    """Return the missing pods that status names; none if the target has grown since, if one of them has a Node, or
    if the job is below its minimum, where it needs any pod that it can get.

    A job that shrinks gives up missing pods first, and asks for none of those that it still misses.
    """
    before, desired = ctx.status.scaled_down, ctx.spec.settings.desired_pods
    if before is None or before.target < ctx.spec.target:
        return frozenset()
    indices = before.indices & frozenset(ctx.all_indices)
    below_min = desired - len(indices | _without_room(ctx).keys()) < ctx.spec.min_replicas
    if below_min and not training.formed:
        return frozenset()
    placed = any(pod.live and pod.node for pod in ctx.current_pods if pod.index in indices)
    return frozenset() if placed else indices


def _scale_down_times(
    ctx: ReconcileContext, training: TrainingState, scaled_down: ScaledDown | None
) -> tuple[float, ...]:
    if not _is_short(ctx, training):
        return ()
    known = scaled_down.indices if scaled_down else frozenset()
    limit = ctx.spec.faulty_scale_down
    return tuple(since + limit for index, since in _without_room(ctx).items() if index not in known)


# ---- below the minimum


def _plan_back_off(ctx: ReconcileContext, training: TrainingState) -> BackOff | None:
    """Return how often the job has given its pods back since the last round, and since when it has none."""
    before = ctx.status.back_off
    if ctx.spec.wait_for_min is None or training.formed or training.is_new_round:
        return None
    if before is not None and before.since is not None:
        return before if ctx.now < _retry_at(ctx, before, before.since) else BackOff(before.attempts)
    due = _back_off_times(ctx, training)
    if not due or ctx.now < due[0]:
        return before
    # Status keeps whole seconds.
    return BackOff((before.attempts if before else 0) + 1, math.floor(ctx.now))


def _back_off_times(ctx: ReconcileContext, training: TrainingState) -> tuple[float, ...]:
    """Return when the job must give its pods back; empty while it has room for its minimum.

    It has been below its minimum since the pod lost its room that was one too many.
    """
    if ctx.spec.wait_for_min is None or training.formed or ctx.status.withdrawn:
        return ()
    times = sorted(_without_room(ctx).values())
    dispensable = ctx.spec.settings.desired_pods - ctx.spec.min_replicas
    return () if len(times) <= dispensable else (times[dispensable] + ctx.spec.wait_for_min,)


def _retry_at(ctx: ReconcileContext, back_off: BackOff, since: float) -> float:
    """Return when the job asks for its pods again. Another operator, on another host, may have written `since`."""
    seen = ctx.observed.back_off_seen
    known = ctx.status.back_off == back_off and seen is not None
    delay = doubling_delay(FIRST_BACK_OFF, LONGEST_BACK_OFF, back_off.attempts)
    return (seen if known and seen is not None else since) + delay * (1 + _jitter(ctx.job.uid, back_off.attempts))


def _jitter(uid: str, attempt: int) -> float:
    """Return a number from 0 to 1: another one for each job and attempt, the same one for each operator."""
    return zlib.crc32(f"{uid}/{attempt}".encode()) / 2**32
