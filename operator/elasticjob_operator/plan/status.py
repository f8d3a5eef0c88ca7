"""The next status: what was observed and what is intended, in one write. Unknown fields of a newer operator stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elasticjob.contract.messages import RecoverySeconds
from elasticjob.contract.names import Label, Role
from elasticjob_operator.manifests.names import endpoint
from elasticjob_operator.model.raw import objects, timestamp
from elasticjob_operator.model.status import Condition, ConditionType
from elasticjob_operator.plan import conditions, stragglers
from elasticjob_operator.plan.budget import MAX_RECENT_FAILURES
from elasticjob_operator.plan.conditions import JobContext
from elasticjob_operator.plan.job_end import all_workers_ended


def next_status(f: JobContext, told: dict[ConditionType, Condition], image: str) -> dict[str, Any]:
    """The whole status. Equal to the one read when nothing has changed."""
    ctx = f.ctx
    status = dict(ctx.status.raw) | {
        "observedGeneration": ctx.job.generation,
        "phase": _phase(f, told),
        "selector": f"{Label.JOB_NAME}={ctx.job.name},{Label.ROLE}={Role.WORKER.value}",
        "targetReplicas": ctx.spec.target,
        **_counts(f),
        "rendezvousRound": f.world.rounds,
        "restarts": f.budget.restarts,
        "restartsCountTowardsMax": f.budget.counted,
        "executionAttempts": max(1, ctx.status.execution_attempts),
        "rendezvous": _rendezvous(f),
        "incarnations": ",".join(map(str, f.workers.incarnations)),
        "runtimeImage": ctx.status.runtime_image or image,
        "warmFork": f.world.warm_fork or None,
        "avoidedNodes": _avoided(f),
        "straggler": stragglers.straggler_record(f),
        "conditions": _written(f, told),
        **_times(f, told),
        **_failures(f),
    }
    if f.budget.charged_round is not None:
        status["chargedRound"] = str(f.budget.charged_round)
    return {name: value for name, value in status.items() if value not in (None, [])}


def same_status(one: Any, other: Any) -> bool:
    """Whether two statuses say the same."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _rendezvous(f: JobContext) -> dict[str, Any] | None:
    if f.store.incarnation is None:
        return None
    return {"endpoint": endpoint(f.ctx.job, f.ctx.spec.port), "incarnation": f.store.incarnation}


_MINOR = ("replicas", "active", "ready", "standby", "succeeded", "failed", "terminating")


def is_minor_change(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two statuses differ in what may wait a moment: counts, and the wording of conditions."""
    return same_status(_gist(one), _gist(other))


def _gist(status: Mapping[str, Any]) -> dict[str, Any]:
    told = [(c.get("type"), c.get("status"), c.get("reason")) for c in objects(status, "conditions")]
    return {name: value for name, value in status.items() if name not in _MINOR} | {"conditions": told}


def _counts(f: JobContext) -> dict[str, int]:
    pods = f.ctx.observed.workers
    ended = [p.end for p in pods if p.end is not None]
    over_ = f.outcome is not None
    return {
        "replicas": sum(p.live for p in pods),
        "active": 0 if over_ else f.world.active,
        "ready": 0 if over_ else f.world.ready,
        "standby": 0 if over_ else f.world.standby,
        "succeeded": sum(e.exit_code == 0 or e.reason == "Succeeded" for e in ended),
        "failed": sum(not (e.exit_code == 0 or e.reason == "Succeeded") for e in ended),
        "terminating": sum(p.deleting is not None and p.end is None for p in pods),
        "worldSize": 0 if over_ else f.world.size,
    }


def _avoided(f: JobContext) -> list[dict[str, str]]:
    return [
        {
            "name": node.name,
            "since": timestamp(node.since),
            "until": timestamp(node.until),
            "why": node.message,
            "reason": node.reason,
        }
        for node in f.workers.avoided
    ]


def _times(f: JobContext, told: dict[ConditionType, Condition]) -> dict[str, str]:
    ctx, now = f.ctx, timestamp(f.ctx.now)
    times = {"startTime": ctx.status.raw.get("startTime") or now}
    if f.world.is_new_round:
        # Microseconds: two rounds may be formed within one second, and each is counted once.
        times["lastRendezvousTime"] = timestamp(f.world.formed_at, precise=True)
    if f.budget.restarts > ctx.status.restarts or f.budget.exhausted:
        times["lastRestartTime"] = now
    if ctx.status.target is not None and ctx.status.target != ctx.spec.target:
        times["lastScaleTime"] = now
    ended = told.get(ConditionType.COMPLETE) or told.get(ConditionType.FAILED)
    if ended is not None and "completionTime" not in ctx.status.raw:
        times["completionTime"] = now
    return times


def _failures(f: JobContext) -> dict[str, Any]:
    new = [*f.budget.uncharged, *f.budget.charged]
    cause = f.outcome.failure if f.outcome else None
    if cause is not None and cause not in new and cause != f.ctx.status.raw.get("lastFailure"):
        new.append(cause)
    known = [dict(record) for record in objects(f.ctx.status.raw, "recentFailures")]
    recent = _with_recovery([*known, *new][-MAX_RECENT_FAILURES:], f.ctx.report.recovery if f.ctx.report else None)
    told = {"recentFailures": recent} if recent != known else {}
    return told | ({"lastFailure": new[-1]} if new else {})


def _with_recovery(recent: list[dict[str, Any]], recovery: RecoverySeconds | None) -> list[dict[str, Any]]:
    """`recent` with the phases of the last recovery beside the last failure of a pod that it was from."""
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


def current_conditions(f: JobContext) -> dict[ConditionType, Condition]:
    """Every condition that applies."""
    told: dict[ConditionType, Condition | None] = {
        ConditionType.RENDEZVOUS_READY: conditions.rendezvous_ready(f),
        ConditionType.RUNNING: conditions.running(f),
        ConditionType.FULLY_SCALED: conditions.fully_scaled(f),
        ConditionType.RESTARTING: conditions.restarting(f),
    }
    if f.outcome is not None:
        met = ConditionType.SUCCESS_CRITERIA_MET if f.outcome.succeeded else ConditionType.FAILURE_TARGET
        final = ConditionType.COMPLETE if f.outcome.succeeded else ConditionType.FAILED
        told[met] = Condition("True", f.outcome.reason, f.outcome.message)
        if all_workers_ended(f.ctx) or f.ctx.status.is_true(final):
            told[final] = Condition("True", f.outcome.reason, f.outcome.message)
    return {kind: value for kind, value in told.items() if value is not None}


def _written(f: JobContext, told: dict[ConditionType, Condition]) -> list[dict[str, Any]]:
    """metav1.Conditions; those of types this operator does not know stay."""
    known = {kind.value for kind in ConditionType}
    others = [dict(c) for c in objects(f.ctx.status.raw, "conditions") if c.get("type") not in known]
    return [_one(f, kind, told[kind]) for kind in ConditionType if kind in told] + others


def _one(f: JobContext, kind: ConditionType, value: Condition) -> dict[str, Any]:
    before = f.ctx.status.conditions.get(kind)
    since = before.since if before is not None and before.status == value.status else f.ctx.now
    return {
        "type": kind.value,
        "status": value.status,
        "reason": value.reason,
        "message": value.message[:32768],
        "observedGeneration": f.ctx.job.generation,
        "lastTransitionTime": timestamp(since),
    }


def _phase(f: JobContext, told: dict[ConditionType, Condition]) -> str:
    if f.outcome is not None:
        return "Succeeded" if f.outcome.succeeded else "Failed"
    if f.world.formed:
        scaled = told[ConditionType.FULLY_SCALED]
        if scaled.true:
            return "Running"
        return "Scaling" if scaled.reason in ("ScalingUp", "ScalingDown") else "Degraded"
    if f.world.rounds > 0:
        fault = told.get(ConditionType.RESTARTING)
        return "Restarting" if fault is not None and fault.true else "Scaling"
    blocked = told[ConditionType.RUNNING].reason != "WaitingForMinReplicas"
    return "Pending" if blocked or not any(p.running for p in f.ctx.observed.workers) else "Starting"
