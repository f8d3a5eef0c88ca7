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
    stages,
    state_transfer,
    stragglers,
    trainer_status,
)
from elasticjob_operator.plan.job_status.decisions import Decisions
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
_MINOR = ("replicas", "active", "ready", "standby", "succeeded", "failed", "terminating", goodput.FIELD, stages.FIELD)
"""Fields whose write may be delayed."""


def next_status(decisions: Decisions, current: dict[ConditionType, Condition], image: str) -> dict[str, Any]:
    """Return the whole next status; it equals the last one when nothing has changed.

    `current` are the conditions of `current_conditions`; `image` is the operator's own.
    """
    ctx = decisions.inputs
    spares = spare_indices(ctx)
    outages, uncounted = decisions.budget.outages[-MAX_OUTAGES:], decisions.budget.uncounted_outages[-MAX_OUTAGES:]
    status = dict(ctx.status.raw) | {
        "observedGeneration": ctx.job.generation,
        "phase": _phase(decisions, current),
        "selector": pod_selector(ctx, spares),
        "targetReplicas": target_replicas(ctx, decisions.capacity),
        "vacantIndices": vacant_ranges(ctx.vacant, decisions.workers.incarnations) or None,
        "scaledDown": _scaled_down(decisions),
        "backOff": _back_off(decisions),
        "cordonSpares": ctx.cordon_spares or None,
        **_counts(decisions, spares),
        "rendezvousRound": decisions.training.rounds,
        "restarts": decisions.budget.restarts,
        "restartsCountTowardsMax": decisions.budget.counted,
        "restartWindow": _restart_window(decisions),
        "failedStarts": decisions.start_attempts.failed or None,
        "startFailures": decisions.start_attempts.in_row or None,
        "chargedOutages": list(outages),
        "chargedFailures": outage_objects(outages),
        "uncountedOutages": list(uncounted),
        "uncountedFailures": outage_objects(uncounted),
        "executionAttempts": _executions(decisions),
        "guardedFields": _guarded(decisions),
        "rendezvous": _rendezvous(decisions),
        "incarnations": ",".join(map(str, decisions.workers.incarnations)),
        "incarnationRanges": incarnation_ranges(decisions.workers.incarnations),
        execution_defaults.FIELD: execution_defaults.execution_defaults(decisions),
        "runtimeImage": _runtime_image(decisions, image),
        "keyId": next_key_id(
            ctx.observed, resumes=decisions.resumes, idle=decisions.suspended or decisions.outcome is not None
        ),
        "warmFork": decisions.training.warm_fork or None,
        "hangGuard": decisions.training.hang_guard or None,
        "avoidedNodes": _avoided_nodes(decisions.workers.avoided),
        "suspectNodes": _avoided_nodes(decisions.workers.suspects),
        "straggler": stragglers.straggler_record(decisions),
        "stateTransfer": state_transfer.state_transfer(decisions),
        stages.FIELD: stages.finished_stages(decisions),
        "goodput": goodput.goodput(decisions),
        "trainerStatus": trainer_status.trainer_status(decisions),
        "conditions": _written_conditions(decisions, current),
        **_times(decisions, current),
        **_failures(decisions),
    }
    if decisions.budget.charged_round is not None:
        status["chargedRound"] = str(decisions.budget.charged_round)
        status["lastChargedRound"] = round_object(decisions.budget.charged_round)
    return _with_due_fields(ctx.status.raw, {n: v for n, v in status.items() if v not in (None, [])}, ctx.now)


def _with_due_fields(before: Mapping[str, Any], status: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the status, or `before` if only fields have changed that are not written alone yet.

    Lists whose texts have not changed never are: an operator that takes over from 0.1.0 would write all jobs, also
    those that have ended.
    """
    progress, costs = trainer_status.FIELD, goodput.FIELD
    others = {name: value for name, value in status.items() if name not in (progress, costs)}
    unchanged = without_lists(others | {n: before[n] for n in (progress, costs) if n in before})
    if not same_status(unchanged, without_lists(before)):
        return status
    progressed = status.get(progress) != before.get(progress) and not trainer_status.is_early(before, now)
    lost = at(status, costs, "lostSeconds") != at(before, costs, "lostSeconds") and costs in before
    return status if progressed or lost else dict(before)


def _restart_window(decisions: Decisions) -> dict[str, Any] | None:
    """Return the window of the last restart that counts; None without restartWindowSeconds."""
    if not (decisions.inputs.spec.restart_window and decisions.budget.counted_since):
        return None
    # Microseconds: the coordinator and the operator must agree on its end.
    return {"start": timestamp(decisions.budget.counted_since, precise=True), "count": decisions.budget.counted}


def _executions(decisions: Decisions) -> int:
    """Return the number of the execution: the next one when the job is resumed, 0 before the first."""
    attempts = decisions.inputs.status.execution_attempts
    if decisions.resumes:
        return attempts + 1
    return attempts if decisions.suspended else attempt(decisions.inputs.job)


def _guarded(decisions: Decisions) -> dict[str, Any] | None:
    """Return from what the pods of the execution are made. That of a job whose status an older operator has written is
    taken for what its spec says now."""
    if decisions.outcome is not None:  # a finished job's status is not written for this alone
        known = decisions.inputs.status.raw.get("guardedFields")
        return dict(known) if isinstance(known, dict) else None
    execution, before, job = _executions(decisions), decisions.inputs.status.guarded, decisions.inputs.job
    if before is None or before.execution != execution or not before.comparable:
        before = GuardedFields(execution, job.guarded_digest, job.queue)
    if not execution or not before.digest:
        return None
    queue = before.queue or job.queue
    return {"execution": execution, "digest": before.digest, **({"queue": queue} if queue else {})}


def _runtime_image(decisions: Decisions, image: str) -> str | None:
    """Return the image of the execution. The next one is pinned to the image of the operator that starts it."""
    if decisions.resumes:
        return image
    return decisions.inputs.status.runtime_image or (None if decisions.suspended else image)


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


def _rendezvous(decisions: Decisions) -> dict[str, Any] | None:
    if decisions.store.incarnation is None:
        # No store of a later execution gets the number of an earlier one.
        return {"newest": decisions.inputs.status.newest_store} if decisions.inputs.status.execution_attempts else None
    rendezvous: dict[str, Any] = {
        "endpoint": endpoint(decisions.inputs.job, decisions.inputs.spec.port),
        "incarnation": decisions.store.incarnation,
    }
    if decisions.store.standby is not None:
        rendezvous["standby"] = decisions.store.standby
    if decisions.inputs.status.newest_store > max(decisions.store.incarnation, decisions.store.standby or 0):
        rendezvous["newest"] = decisions.inputs.status.newest_store
    last = decisions.training.last_round
    return rendezvous | ({"round": str(last), "lastRound": round_object(last)} if last else {})


def _scaled_down(decisions: Decisions) -> dict[str, Any] | None:
    missing = decisions.capacity.scaled_down
    if missing is None:
        return None
    indices = ",".join(map(str, sorted(missing.indices)))
    return {"replicas": missing.target, "indices": indices, "indexRanges": index_ranges(missing.indices)}


def _back_off(decisions: Decisions) -> dict[str, Any] | None:
    """A job that has ended waits for no room, also if it trained too shortly for a reconcile to see its round."""
    back_off = decisions.capacity.back_off
    if back_off is None or decisions.outcome is not None:
        return None
    return {"attempts": back_off.attempts} | ({} if back_off.since is None else {"since": timestamp(back_off.since)})


def _counts(decisions: Decisions, spares: frozenset[int]) -> dict[str, int]:
    pods = decisions.inputs.observed.workers
    ended = [p for p in pods if p.end is not None]
    succeeded = sum(map(_succeeded, ended))
    running = decisions.outcome is None
    return {
        "replicas": sum(p.live and p.index not in spares for p in pods),
        "active": decisions.training.active if running else 0,
        "ready": decisions.training.ready if running else 0,
        "standby": decisions.training.standby if running else 0,
        "succeeded": succeeded,
        "failed": len(ended) - succeeded,
        "terminating": sum(p.deleting is not None and p.end is None for p in pods),
        "worldSize": decisions.training.size if running else 0,
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


def _times(decisions: Decisions, current: dict[ConditionType, Condition]) -> dict[str, str]:
    ctx, now = decisions.inputs, timestamp(decisions.inputs.now)
    times: dict[str, str] = {}
    if decisions.resumes or not (decisions.suspended or "startTime" in ctx.status.raw):
        times["startTime"] = now
    if decisions.training.is_new_round:
        # Microseconds, because two rounds may form within one second and each must be counted once.
        times["lastRendezvousTime"] = timestamp(decisions.training.formed_at, precise=True)
    if decisions.budget.restarts > ctx.status.restarts:
        times["lastRestartTime"] = now
    if decisions.start_attempts.failed > ctx.status.failed_starts:
        times["lastStartFailureTime"] = timestamp(decisions.start_attempts.failed_at)
    if ctx.status.target is not None and ctx.status.target != ctx.spec.target and not decisions.suspended:
        times["lastScaleTime"] = now
    ended = current.get(ConditionType.COMPLETE) or current.get(ConditionType.FAILED)
    if ended is not None and "completionTime" not in ctx.status.raw:
        times["completionTime"] = now
    return times


def _failures(decisions: Decisions) -> dict[str, Any]:
    new = [*decisions.budget.uncharged, *decisions.budget.charged]
    cause = decisions.outcome.failure if decisions.outcome else None
    if cause is not None and cause not in new and cause != decisions.inputs.status.raw.get("lastFailure"):
        new.append(cause)
    known = [dict(record) for record in objects(decisions.inputs.status.raw, "recentFailures")]
    recovery = decisions.inputs.report.recovery if decisions.inputs.report else None
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


def current_conditions(decisions: Decisions) -> dict[ConditionType, Condition]:
    """Return every condition that applies."""
    current: dict[ConditionType, Condition | None] = {
        ConditionType.SUSPENDED: conditions.suspended(decisions),
        ConditionType.RENDEZVOUS_READY: conditions.rendezvous_ready(decisions),
        ConditionType.RUNNING: conditions.running(decisions),
        ConditionType.FULLY_SCALED: conditions.fully_scaled(decisions),
        ConditionType.RESTARTING: conditions.restarting(decisions),
    }
    if decisions.outcome is not None:
        target = ConditionType.SUCCESS_CRITERIA_MET if decisions.outcome.succeeded else ConditionType.FAILURE_TARGET
        terminal = ConditionType.COMPLETE if decisions.outcome.succeeded else ConditionType.FAILED
        current[target] = conditions.condition(True, decisions.outcome.reason, decisions.outcome.message)
        if all_workers_ended(decisions.inputs) or decisions.inputs.status.is_true(terminal):
            current[terminal] = current[target]
    return {kind: value for kind, value in current.items() if value is not None}


def _written_conditions(decisions: Decisions, current: dict[ConditionType, Condition]) -> list[dict[str, Any]]:
    """Return metav1.Conditions; conditions of types that this operator does not know stay as they are."""
    known = {kind.value for kind in ConditionType}
    others = [dict(c) for c in objects(decisions.inputs.status.raw, "conditions") if text(c, "type") not in known]
    written = [_written(decisions, kind, current[kind]) for kind in ConditionType if kind in current]
    return written + others


def _written(decisions: Decisions, kind: ConditionType, value: Condition) -> dict[str, Any]:
    before = decisions.inputs.status.conditions.get(kind)
    since = before.since if before is not None and before.status == value.status else decisions.inputs.now
    return written_condition(kind, value, decisions.inputs.job.generation, since)


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


def _phase(decisions: Decisions, current: dict[ConditionType, Condition]) -> str:
    if decisions.outcome is not None:
        return "Succeeded" if decisions.outcome.succeeded else "Failed"
    if decisions.suspended and not decisions.resumes:
        return "Suspended"
    if decisions.training.formed:
        scaled = current[ConditionType.FULLY_SCALED]
        if scaled.true:
            return "Running"
        return "Scaling" if scaled.reason in ("ScalingUp", "ScalingDown") else "Degraded"
    if decisions.capacity.retry_at is not None:
        return "Pending"
    if decisions.trained:
        return _phase_between_rounds(decisions, current)
    blocked = current[ConditionType.RUNNING].reason != "WaitingForMinReplicas"
    return "Pending" if blocked or not any(p.running for p in decisions.inputs.observed.workers) else "Starting"


def _phase_between_rounds(decisions: Decisions, current: dict[ConditionType, Condition]) -> str:
    """Return the phase of a job that has trained and whose workers are down.

    While a round ends, the operator does not know why. A job that has all pods changes its size only if someone asks
    for another one; a job that misses pods may also take in their replacements.
    """
    restarting = current.get(ConditionType.RESTARTING)
    if restarting is not None and restarting.true:
        return "Restarting"
    scales = current[ConditionType.FULLY_SCALED].reason in ("ScalingUp", "ScalingDown")
    return (
        "Scaling" if scales or text(decisions.inputs.status.raw, "phase") in ("Scaling", "Degraded") else "Restarting"
    )
