"""The next status: observations and intentions in one write. Fields that a newer operator wrote stay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from elasticjob._runtime.contract.messages import RecoverySeconds
from elasticjob_operator.manifests.names import attempt, endpoint
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import at, objects, text, timestamp
from elasticjob_operator.model.job.guarded import GuardedFields
from elasticjob_operator.model.job.status import AvoidedNode, Condition, ConditionType
from elasticjob_operator.model.job.status_lists import (
    incarnation_ranges,
    index_ranges,
    outage_objects,
    round_object,
    vacant_ranges,
    without_lists,
)
from elasticjob_operator.plan.failure_policy.budget import MAX_OUTAGES, MAX_RECENT_FAILURES
from elasticjob_operator.plan.job_status import (
    conditions,
    execution_defaults,
    goodput,
    state_transfer,
    stragglers,
    trainer_status,
)
from elasticjob_operator.plan.job_status.conditions import JobContext
from elasticjob_operator.plan.life_cycle.job_end import all_workers_ended
from elasticjob_operator.plan.life_cycle.key_ids import next_key_id
from elasticjob_operator.plan.pods.capacity import target_replicas
from elasticjob_operator.plan.pods.scale import pod_selector, spare_indices

MINOR_SECONDS = 1.0
"""Longest delay of a minor status change, in seconds."""
STARTING_SECONDS = 5.0
"""The same for counts and messages of a job that has not trained yet: all of them change until its pods run."""

_STARTING = ("Pending", "Starting")
"""The phases of a job before its first round, and of one that has given its pods back."""
_STORE_STATES = (("False", "StoreStarting"), ("True", "StoreAvailable"))
"""Status and reason of the condition RendezvousReady while a job starts."""
_MINOR = ("replicas", "active", "ready", "standby", "succeeded", "failed", "terminating", goodput.FIELD)
"""Fields whose write may be delayed."""


def next_status(job: JobContext, current: dict[ConditionType, Condition], image: str) -> dict[str, Any]:
    """Return the whole next status; it equals the last one when nothing has changed.

    `current` are the conditions of `current_conditions`; `image` is the operator's own.
    """
    ctx = job.ctx
    spares = spare_indices(ctx)
    outages, uncounted = job.budget.outages[-MAX_OUTAGES:], job.budget.uncounted_outages[-MAX_OUTAGES:]
    status = dict(ctx.status.raw) | {
        "observedGeneration": ctx.job.generation,
        "phase": _phase(job, current),
        "selector": pod_selector(ctx, spares),
        "targetReplicas": target_replicas(ctx, job.capacity),
        "vacantIndices": vacant_ranges(ctx.vacant, job.workers.incarnations) or None,
        "scaledDown": _scaled_down(job),
        "backOff": _back_off(job),
        "cordonSpares": ctx.cordon_spares or None,
        **_counts(job, spares),
        "rendezvousRound": job.world.rounds,
        "restarts": job.budget.restarts,
        "restartsCountTowardsMax": job.budget.counted,
        "restartWindow": _restart_window(job),
        "failedStarts": job.starts.failed or None,
        "startFailures": job.starts.in_row or None,
        "chargedOutages": list(outages),
        "chargedFailures": outage_objects(outages),
        "uncountedOutages": list(uncounted),
        "uncountedFailures": outage_objects(uncounted),
        "executionAttempts": _executions(job),
        "guardedFields": _guarded(job),
        "rendezvous": _rendezvous(job),
        "incarnations": ",".join(map(str, job.workers.incarnations)),
        "incarnationRanges": incarnation_ranges(job.workers.incarnations),
        execution_defaults.FIELD: execution_defaults.execution_defaults(job),
        "runtimeImage": _runtime_image(job, image),
        "keyId": next_key_id(ctx.observed, resumes=job.resumes, idle=job.suspended or job.outcome is not None),
        "warmFork": job.world.warm_fork or None,
        "hangGuard": job.world.hang_guard or None,
        "avoidedNodes": _avoided_nodes(job.workers.avoided),
        "suspectNodes": _avoided_nodes(job.workers.suspects),
        "straggler": stragglers.straggler_record(job),
        "stateTransfer": state_transfer.state_transfer(job),
        "goodput": goodput.goodput(job),
        "trainerStatus": trainer_status.trainer_status(job),
        "conditions": _written_conditions(job, current),
        **_times(job, current),
        **_failures(job),
    }
    if job.budget.charged_round is not None:
        status["chargedRound"] = str(job.budget.charged_round)
        status["lastChargedRound"] = round_object(job.budget.charged_round)
    return _with_due_fields(ctx.status.raw, {n: v for n, v in status.items() if v not in (None, [])}, ctx.now)


def _with_due_fields(before: Mapping[str, Any], status: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the status, or `before` if only fields have changed that are not written alone yet.

    Lists beside unchanged texts never are: an operator that takes over from 0.1.0 would write all jobs, also those that
    have ended.
    """
    progress, costs = trainer_status.FIELD, goodput.FIELD
    others = {name: value for name, value in status.items() if name not in (progress, costs)}
    unchanged = without_lists(others | {n: before[n] for n in (progress, costs) if n in before})
    if not same_status(unchanged, without_lists(before)):
        return status
    progressed = status.get(progress) != before.get(progress) and not trainer_status.is_early(before, now)
    lost = at(status, costs, "lostSeconds") != at(before, costs, "lostSeconds") and costs in before
    return status if progressed or lost else dict(before)


def _restart_window(job: JobContext) -> dict[str, Any] | None:
    """Return the window of the last restart that counts; None without restartWindowSeconds."""
    if not (job.ctx.spec.restart_window and job.budget.counted_since):
        return None
    # Microseconds: the coordinator and the operator must agree on its end.
    return {"start": timestamp(job.budget.counted_since, precise=True), "count": job.budget.counted}


def _executions(job: JobContext) -> int:
    """Return the number of the execution: the next one when the job is resumed, 0 before the first."""
    attempts = job.ctx.status.execution_attempts
    if job.resumes:
        return attempts + 1
    return attempts if job.suspended else attempt(job.ctx.job)


def _guarded(job: JobContext) -> dict[str, Any] | None:
    """Return from what the pods of the execution are made. That of a job whose status an older operator has written is
    taken for what its spec says now."""
    if job.outcome is not None:  # a finished job's status is not written for this alone
        known = job.ctx.status.raw.get("guardedFields")
        return dict(known) if isinstance(known, dict) else None
    execution, before = _executions(job), job.ctx.status.guarded
    if before is None or before.execution != execution or not before.comparable:
        before = GuardedFields(execution, job.ctx.job.guarded_digest)
    return {"execution": execution, "digest": before.digest} if execution and before.digest else None


def _runtime_image(job: JobContext, image: str) -> str | None:
    """Return the image of the execution. The next one is pinned to the image of the operator that starts it."""
    if job.resumes:
        return image
    return job.ctx.status.runtime_image or (None if job.suspended else image)


def same_status(one: Any, other: Any) -> bool:
    """Return whether two statuses are equal as JSON."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def write_delay(status: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """Return for how many seconds the write of a status may be delayed, to be combined with later changes.

    Nothing may depend on such a write. Counts and messages of conditions may wait, and so may the steps of a start:
    pods start and end in batches, and each write wakes all watchers.
    """
    if same_status(_without_minor(status), _without_minor(before)):
        return STARTING_SECONDS if before.get("phase") in _STARTING else MINOR_SECONDS
    return MINOR_SECONDS if same_status(_without_start(status), _without_start(before)) else 0.0


def _without_minor(status: Mapping[str, Any]) -> dict[str, Any]:
    states = [(c.get("type"), c.get("status"), c.get("reason")) for c in objects(status, "conditions")]
    return {name: value for name, value in status.items() if name not in _MINOR} | {"conditions": states}


def _without_start(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without minor fields and without the steps of a start: its store serves, its pods run."""
    rest = _without_minor(status)
    if status.get("phase") not in _STARTING:
        return rest
    steps = [(ConditionType.RENDEZVOUS_READY.value, *state) for state in _STORE_STATES]
    return rest | {"phase": _STARTING, "conditions": [state for state in rest["conditions"] if state not in steps]}


def _rendezvous(job: JobContext) -> dict[str, Any] | None:
    if job.store.incarnation is None:
        # No store of a later execution gets the number of an earlier one.
        return {"newest": job.ctx.status.newest_store} if job.ctx.status.execution_attempts else None
    rendezvous: dict[str, Any] = {
        "endpoint": endpoint(job.ctx.job, job.ctx.spec.port),
        "incarnation": job.store.incarnation,
    }
    if job.store.standby is not None:
        rendezvous["standby"] = job.store.standby
    if job.ctx.status.newest_store > max(job.store.incarnation, job.store.standby or 0):
        rendezvous["newest"] = job.ctx.status.newest_store
    last = job.world.last_round
    return rendezvous | ({"round": str(last), "lastRound": round_object(last)} if last else {})


def _scaled_down(job: JobContext) -> dict[str, Any] | None:
    missing = job.capacity.scaled_down
    if missing is None:
        return None
    indices = ",".join(map(str, sorted(missing.indices)))
    return {"replicas": missing.target, "indices": indices, "indexRanges": index_ranges(missing.indices)}


def _back_off(job: JobContext) -> dict[str, Any] | None:
    back_off = job.capacity.back_off
    if back_off is None:
        return None
    return {"attempts": back_off.attempts} | ({} if back_off.since is None else {"since": timestamp(back_off.since)})


def _counts(job: JobContext, spares: frozenset[int]) -> dict[str, int]:
    pods = job.ctx.observed.workers
    ended = [p for p in pods if p.end is not None]
    succeeded = sum(map(_succeeded, ended))
    running = job.outcome is None
    return {
        "replicas": sum(p.live and p.index not in spares for p in pods),
        "active": job.world.active if running else 0,
        "ready": job.world.ready if running else 0,
        "standby": job.world.standby if running else 0,
        "succeeded": succeeded,
        "failed": len(ended) - succeeded,
        "terminating": sum(p.deleting is not None and p.end is None for p in pods),
        "worldSize": job.world.size if running else 0,
    }


def _succeeded(pod: Pod) -> bool:
    return pod.end is not None and (pod.end.exit_code == 0 or pod.end.reason == "Succeeded")


def _avoided_nodes(nodes: Iterable[AvoidedNode]) -> list[dict[str, str]]:
    return [
        {
            "name": node.name,
            "since": timestamp(node.since),
            "until": timestamp(node.until),
            "why": node.message,
            "reason": node.reason,
        }
        for node in nodes
    ]


def _times(job: JobContext, current: dict[ConditionType, Condition]) -> dict[str, str]:
    ctx, now = job.ctx, timestamp(job.ctx.now)
    times: dict[str, str] = {}
    if job.resumes or not (job.suspended or "startTime" in ctx.status.raw):
        times["startTime"] = now
    if job.world.is_new_round:
        # Microseconds, because two rounds may form within one second and each must be counted once.
        times["lastRendezvousTime"] = timestamp(job.world.formed_at, precise=True)
    if job.budget.restarts > ctx.status.restarts:
        times["lastRestartTime"] = now
    if job.starts.failed > ctx.status.failed_starts:
        times["lastStartFailureTime"] = timestamp(job.starts.failed_at)
    if ctx.status.target is not None and ctx.status.target != ctx.spec.target and not job.suspended:
        times["lastScaleTime"] = now
    ended = current.get(ConditionType.COMPLETE) or current.get(ConditionType.FAILED)
    if ended is not None and "completionTime" not in ctx.status.raw:
        times["completionTime"] = now
    return times


def _failures(job: JobContext) -> dict[str, Any]:
    new = [*job.budget.uncharged, *job.budget.charged]
    cause = job.outcome.failure if job.outcome else None
    if cause is not None and cause not in new and cause != job.ctx.status.raw.get("lastFailure"):
        new.append(cause)
    known = [dict(record) for record in objects(job.ctx.status.raw, "recentFailures")]
    recovery = job.ctx.report.recovery if job.ctx.report else None
    recent = _with_recovery([*known, *new][-MAX_RECENT_FAILURES:], recovery)
    fields: dict[str, Any] = {"recentFailures": recent} if recent != known else {}
    return fields | ({"lastFailure": new[-1]} if new else {})


def _with_recovery(recent: list[dict[str, Any]], recovery: RecoverySeconds | None) -> list[dict[str, Any]]:
    """Return `recent` with the phases of the last recovery added to the failure that caused it: the newest failure of
    one of the pods that the recovery names."""
    if recovery is None:
        return recent
    phases = {name: round(getattr(recovery, name), 3) for name in ("detect", "stop", "rendezvous", "start")}
    for i, record in reversed([*enumerate(recent)]):
        if record.get("pod") in recovery.pods:
            if "recoverySeconds" not in record:
                recent[i] = record | {"recoverySeconds": phases}
            break
    return recent


# ---- conditions ------------------------------------------------------------------------------------------------


def current_conditions(job: JobContext) -> dict[ConditionType, Condition]:
    """Return every condition that applies."""
    current: dict[ConditionType, Condition | None] = {
        ConditionType.SUSPENDED: conditions.suspended(job),
        ConditionType.RENDEZVOUS_READY: conditions.rendezvous_ready(job),
        ConditionType.RUNNING: conditions.running(job),
        ConditionType.FULLY_SCALED: conditions.fully_scaled(job),
        ConditionType.RESTARTING: conditions.restarting(job),
    }
    if job.outcome is not None:
        target = ConditionType.SUCCESS_CRITERIA_MET if job.outcome.succeeded else ConditionType.FAILURE_TARGET
        terminal = ConditionType.COMPLETE if job.outcome.succeeded else ConditionType.FAILED
        current[target] = conditions.condition(True, job.outcome.reason, job.outcome.message)
        if all_workers_ended(job.ctx) or job.ctx.status.is_true(terminal):
            current[terminal] = current[target]
    return {kind: value for kind, value in current.items() if value is not None}


def _written_conditions(job: JobContext, current: dict[ConditionType, Condition]) -> list[dict[str, Any]]:
    """Return metav1.Conditions; conditions of types that this operator does not know stay as they are."""
    known = {kind.value for kind in ConditionType}
    others = [dict(c) for c in objects(job.ctx.status.raw, "conditions") if text(c, "type") not in known]
    written = [_written(job, kind, current[kind]) for kind in ConditionType if kind in current]
    return written + others


def _written(job: JobContext, kind: ConditionType, value: Condition) -> dict[str, Any]:
    before = job.ctx.status.conditions.get(kind)
    since = before.since if before is not None and before.status == value.status else job.ctx.now
    return written_condition(kind, value, job.ctx.job.generation, since)


def written_condition(kind: ConditionType, value: Condition, generation: int, since: float) -> dict[str, Any]:
    """Return the metav1.Condition; `since` is its lastTransitionTime in Unix seconds."""
    return {
        "type": kind.value,
        "status": value.status,
        "reason": value.reason,
        "message": value.message[:32768],
        "observedGeneration": generation,
        "lastTransitionTime": timestamp(since),
    }


def _phase(job: JobContext, current: dict[ConditionType, Condition]) -> str:
    if job.outcome is not None:
        return "Succeeded" if job.outcome.succeeded else "Failed"
    if job.suspended and not job.resumes:
        return "Suspended"
    if job.world.formed:
        scaled = current[ConditionType.FULLY_SCALED]
        if scaled.true:
            return "Running"
        return "Scaling" if scaled.reason in ("ScalingUp", "ScalingDown") else "Degraded"
    if job.capacity.retry_at is not None:
        return "Pending"
    if job.trained:
        return _phase_between_rounds(job, current)
    blocked = current[ConditionType.RUNNING].reason != "WaitingForMinReplicas"
    return "Pending" if blocked or not any(p.running for p in job.ctx.observed.workers) else "Starting"


def _phase_between_rounds(job: JobContext, current: dict[ConditionType, Condition]) -> str:
    """Return the phase of a job that has trained and whose workers are down.

    While a round ends, the operator does not know why. A job that has all nodes changes its size only if someone asks
    for another one; a job that misses nodes may also take in their replacements.
    """
    restarting = current.get(ConditionType.RESTARTING)
    if restarting is not None and restarting.true:
        return "Restarting"
    scales = current[ConditionType.FULLY_SCALED].reason in ("ScalingUp", "ScalingDown")
    return "Scaling" if scales or text(job.ctx.status.raw, "phase") in ("Scaling", "Degraded") else "Restarting"
