"""The four conditions of a job that has not ended: the state, its reason, and what the user can do about it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from elasticjob._runtime.contract.failures.failure_text import REASON_BY_CLASS
from elasticjob._runtime.contract.messages import EndReason
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.manifests import gang_child
from elasticjob_operator.manifests.names import key_secret, nodes_service, store_pod, store_service, worker_pod
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.job.status import AvoidedNode, Condition, ConditionType
from elasticjob_operator.model.observed import Refusal
from elasticjob_operator.plan.context import LOST_GRACE_SECONDS
from elasticjob_operator.plan.failure_policy.failures import describe_record
from elasticjob_operator.plan.job_status.decisions import Decisions
from elasticjob_operator.plan.life_cycle.queueing import describe_quota, nodes_without_quota
from elasticjob_operator.plan.life_cycle.suspension import suspended_condition
from elasticjob_operator.plan.pods.capacity import describe_back_off, target_replicas
from elasticjob_operator.plan.pods.cordons import describe_cordon_spares
from elasticjob_operator.plan.pods.node_warnings import describe_leaving
from elasticjob_operator.plan.pods.pod_decisions import (
    AwaitEnd,
    ReplacePod,
    did_not_start,
)
from elasticjob_operator.plan.pods.start_problems import (
    CHANGE,
    POD_START_FAILED,
    UNSCHEDULABLE,
    describe_refusal,
    describe_unschedulable,
    describe_waiting,
    lacks_room,
    refusal_reason,
    unschedulable_reason,
)
from elasticjob_operator.plan.store_pods.operator_reach import describe_unreachable, suspects_itself
from elasticjob_operator.plan.training_state import TrainingState


def condition(status: bool, reason: str, message: str) -> Condition:
    """Return a condition that is True or False."""
    return Condition("True" if status else "False", reason, message)


def _inactive(decisions: Decisions) -> Condition | None:
    """Return the condition of a job that has ended or is suspended; None of one that runs."""
    if decisions.outcome is not None:
        return condition(False, "Finished", "the job has ended")
    return condition(False, "Suspended", "the job is suspended") if decisions.suspended else None


# ---- Suspended -------------------------------------------------------------------------------------------------


def suspended(decisions: Decisions) -> Condition | None:
    """Return whether the job is suspended; None for one that never was. A job that has ended is not."""
    if decisions.outcome is None:
        return suspended_condition(decisions.inputs)
    return _inactive(decisions) if ConditionType.SUSPENDED in decisions.inputs.status.conditions else None


# ---- RendezvousReady -------------------------------------------------------------------------------------------


def rendezvous_ready(decisions: Decisions) -> Condition:
    """Return whether the store serves. A link that has been down for less than the grace period changes nothing."""
    ctx, store, link = decisions.inputs, decisions.store, decisions.inputs.observed.link
    before = ctx.status.conditions.get(ConditionType.RENDEZVOUS_READY)
    same_store = store.incarnation == ctx.status.store_incarnation
    if (inactive := _inactive(decisions)) is not None:
        return inactive
    if store.pod is not None and link.connected and same_store:
        return condition(True, "StoreAvailable", f"store pod {store.pod.name} serves")
    if store.pod is not None and store.promoted:
        return condition(True, "StoreAvailable", f"store pod {store.pod.name} serves")
    if store.pod is not None and same_store and link.refused:
        return condition(False, "LinkRefused", _describe_refusal(store.pod, link.refused))
    was_ready = before is not None and (before.true or before.reason in _REASONS_OF_LOSS)
    if store.pod is not None and same_store and before is not None and ctx.now < link.since + LOST_GRACE_SECONDS:
        return before
    if not was_ready:
        return condition(False, "StoreStarting", _store_problem(decisions) or "the store pod is starting")
    if store.incarnation and not (store.pod is not None and same_store):
        problem = _store_problem(decisions) or f"store pod {store_pod(ctx.job.name, store.incarnation)} is starting"
        return condition(False, "StoreRescheduled", f"{problem}; training continues meanwhile")
    if store.lost_reason:
        return condition(False, "StoreLost", store.lost_reason)
    if store.pod is not None and suspects_itself(ctx.observed.reach):
        late = ctx.lease_late(store.pod.node)
        message = describe_unreachable(ctx.observed.reach, store.pod, since=link.since, kubelet_late=late)
        return Condition("Unknown", "StoreUnreachable", message)
    message = (
        f"the store has not responded since {timestamp(link.since)}: the counts in status are of that time, and "
        "failures and restarts since then are unknown. Training continues without a store; workers that fail are "
        "restarted once a store serves"
    )
    return condition(False, "StoreLost", message)


_REASONS_OF_LOSS = ("StoreLost", "StoreRescheduled", "StoreUnreachable", "LinkRefused")
"""Reasons for which a store that has served does not count as serving."""


def _describe_refusal(store: Pod, refused: str) -> str:
    return (
        f"store pod {store.name} refuses the operator: {refused}. Training and restarts continue, but status is not "
        "updated. If the operator has lost the master key under which this execution began, write that key into the "
        "operator's Secret as data.previous and restart the operator, or suspend the job and resume it for new keys"
    )


def _store_problem(decisions: Decisions) -> str:
    """Return the problem that keeps the store pod from starting; empty if none is known."""
    if decisions.store.incarnation is None:
        return ""
    refusal = decisions.inputs.observed.refusals.get(store_pod(decisions.inputs.job.name, decisions.store.incarnation))
    if refusal is not None:
        return f"the store pod cannot be created: {refusal.message}"
    pod = decisions.inputs.store_pod(decisions.store.incarnation)
    if pod is None:
        return ""
    if pod.unschedulable:
        return f"store pod {pod.name} is unschedulable: {pod.unschedulable}"
    if pod.image_error:
        return f"the image of store pod {pod.name} cannot be pulled: {pod.image_error}"
    return f"store pod {pod.name} does not start: {pod.stuck}" if pod.stuck else ""


# ---- Running ---------------------------------------------------------------------------------------------------


def running(decisions: Decisions) -> Condition:
    """Return whether workers train; if not, the first problem that prevents it. Objects that cannot be read are named
    in any case, and a mistake in the spec that counts for the next pods only."""
    found, problems = _running(decisions), list(decisions.inputs.observed.unreadable[:_MAX_UNREADABLE])
    if (mistake := decisions.inputs.job.spec_error) and _inactive(decisions) is None and mistake not in found.message:
        problems.append(f"no new pod can be created: {mistake}. Correct the template: {CHANGE}")
    return replace(found, message="; ".join((found.message, *problems)))


_MAX_UNREADABLE = 3
"""Objects that cannot be read and that the condition names."""


def _running(decisions: Decisions) -> Condition:
    if (inactive := _inactive(decisions)) is not None:
        return inactive
    if decisions.training.formed:
        return condition(True, "WorldFormed", describe_world(decisions.training))
    if decisions.capacity.retry_at is not None:
        return condition(False, "BackedOff", describe_back_off(decisions.inputs, decisions.capacity))
    blocked = _blocked(decisions)
    if blocked is not None:
        return blocked
    if decisions.trained:
        return condition(False, "Restarting", decisions.training.reason or "the workers are restarting")
    pods = f"{decisions.training.ready} of at least {with_noun(decisions.inputs.spec.min_replicas, 'pod')} ready"
    message = (
        decisions.training.reason if decisions.training.starts else f"starting: {decisions.training.reason or pods}"
    )
    if decisions.start_attempts.in_row:
        failed = f"{with_noun(decisions.start_attempts.in_row, 'attempt')} to start pods failed"
        message += f"; {failed}: see status.lastFailure"
    return condition(False, "WaitingForMinReplicas", message)


def describe_world(training: TrainingState) -> str:
    """Return the size of the running training, for messages."""
    return f"training on {with_noun(training.active, 'pod')} with {with_noun(training.size, 'worker')}"


def _blocked(decisions: Decisions) -> Condition | None:
    """Return the problem that keeps the job below its minimum; None if there is none."""
    store = _store_blocked(decisions)
    if store is not None:
        return store
    refusals = _refusals(decisions)
    unschedulable = [p for p in decisions.kept_pods if p.unschedulable]
    waiting = [p for p in decisions.kept_pods if p.image_error or p.stuck]
    failed = [p for p in decisions.kept_pods if did_not_start(p)]
    available = len(decisions.pod_decisions) - len(refusals) - len(unschedulable) - len(waiting) - len(failed)
    if available >= decisions.inputs.spec.min_replicas:
        return None
    if refusals:
        return _refused(refusals[0])
    if (problem := describe_waiting(waiting)) is not None:
        return condition(False, *problem)
    if failed:
        return condition(False, POD_START_FAILED, _describe_failed_start(decisions, failed[0]))
    pods = f"{available} of at least {with_noun(decisions.inputs.spec.min_replicas, 'pod')} available"
    then = ". The job continues once the cluster has room" if lacks_room(unschedulable[0]) else ""
    return condition(False, UNSCHEDULABLE, f"{pods}; {describe_unschedulable(unschedulable[0])}{then}")


def _describe_failed_start(decisions: Decisions, pod: Pod) -> str:
    failure, starts = pod.end.start_failure if pod.end else "", decisions.start_attempts
    attempts = f"{starts.in_row} of {with_noun(decisions.inputs.spec.max_start_failures, 'attempt')} in a row failed"
    retry = timestamp(math.ceil(max(starts.retry_at, decisions.inputs.now)))
    again = f"The operator tries again at {retry}. If the template is wrong, correct it: {CHANGE}"
    return f"{pod.name}: {failure.rstrip('.')}; {attempts}. {again}"


def _refused(refusal: Refusal, field: str = "the template") -> Condition:
    return condition(False, refusal.reason.value, describe_refusal(refusal, field))


def _store_blocked(decisions: Decisions) -> Condition | None:
    name, observed = decisions.inputs.job.name, decisions.inputs.observed
    children = {
        f"Service {nodes_service(name)}": observed.children.nodes,
        f"Service {store_service(name)}": observed.children.rendezvous,
    }
    if gang := gang_child(decisions.inputs.job, decisions.inputs.spec):
        children[gang.replace("/", " ")] = observed.children.gang
    others = {child_name: child for child_name, child in children.items() if child is not None and not child.ours}
    taken = [child_name for child_name, child in others.items() if not child.terminating]
    if taken:
        verb, them = ("exists and does", "it") if len(taken) == 1 else ("exist and do", "them")
        message = f"{', '.join(taken)} {verb} not belong to this job: delete {them}, or give the job another name"
        return condition(False, "NameTaken", message)
    if others:
        message = f"starting: Kubernetes is still deleting {', '.join(others)}, and the job needs the name"
        return condition(False, "WaitingForMinReplicas", message)
    keys = [f"Secret/{key_secret(decisions.inputs.job)}", *(child_name.replace(" ", "/") for child_name in children)]
    if decisions.store.incarnation is not None:
        keys.append(store_pod(name, decisions.store.incarnation))
    refusal = next((observed.refusals[key] for key in keys if key in observed.refusals), None)
    return None if refusal is None else _refused(refusal, "rendezvous.store")


def _refusals(decisions: Decisions) -> list[Refusal]:
    """Return the refusals of worker pods."""
    name, refusals = decisions.inputs.job.name, decisions.inputs.observed.refusals
    expected = [pod.pod for pod in decisions.workers.expected_pods]
    missing = [worker_pod(name, d.index, d.incarnation or 0) for d in decisions.pod_decisions if d.pod is None]
    return [refusals[pod] for pod in dict.fromkeys(expected + missing) if pod in refusals]


# ---- FullyScaled -----------------------------------------------------------------------------------------------


def fully_scaled(decisions: Decisions) -> Condition:
    """Return whether as many pods train as the job should have. Missing spares do not make the condition False."""
    if (inactive := _inactive(decisions)) is not None:
        return inactive
    target, spares, indices = (
        decisions.inputs.spec.target,
        decisions.inputs.spec.spares,
        frozenset(decisions.inputs.all_indices),
    )
    surplus = [p for p in decisions.inputs.observed.workers if p.index not in indices and p.end is None]
    if surplus or decisions.training.active > target:
        message = f"scaling down to {with_noun(target, 'pod')}; pods still to be removed: {len(surplus)}"
        return condition(False, "ScalingDown", message)
    active = f"training on {decisions.training.active} of {with_noun(target, 'pod')}"
    message = (
        active if decisions.training.formed or decisions.trained else f"none of {with_noun(target, 'pod')} trains yet"
    )
    if (
        decisions.training.formed
        and decisions.training.active == target
        and (missing := nodes_without_quota(decisions.inputs))
    ):
        wanted = with_noun(target + missing, "pod")
        message = f"training on {target} of {wanted}; {describe_quota(decisions.inputs)}"
        return condition(False, "InsufficientCapacity", message)
    if decisions.training.formed and decisions.training.active == target:
        standby = f"; standby spares: {decisions.training.standby} of {spares}" if spares else ""
        return condition(True, "AtDesiredReplicas", f"{message}{standby}{describe_cordon_spares(decisions.inputs)}")
    reason, why = _shortage(decisions)
    if decisions.capacity.scaled_down is not None:
        lowered = target_replicas(decisions.inputs, decisions.capacity)
        why += f"; status.targetReplicas is {lowered} until the cluster has room"
    return condition(False, reason, f"{message}; {why}")


def _shortage(decisions: Decisions) -> tuple[str, str]:
    """Return why fewer pods train than the job should have: the condition's reason, and a message."""
    if decisions.capacity.retry_at is not None:
        return "InsufficientCapacity", "the job has given its pods back (see the condition Running)"
    refusals, unschedulable = _refusals(decisions), [p for p in decisions.kept_pods if p.unschedulable]
    if refusals:
        return refusal_reason(refusals[0]), describe_refusal(refusals[0])
    unscheduled = [describe_unschedulable(pod) for pod in unschedulable[:1]]
    avoided = [_describe_avoided(node) for node in decisions.workers.avoided]
    if unscheduled and not avoided:
        return unschedulable_reason(unschedulable[0]), unscheduled[0]
    if avoided:
        return "NodeFault", "; ".join(avoided + unscheduled)
    if decisions.capacity.scaled_down is not None:
        return "InsufficientCapacity", "the pod that shows whether there is room is being created"
    if (problem := describe_waiting(decisions.kept_pods)) is not None:
        return problem
    failed = [p for p in decisions.kept_pods if did_not_start(p)]
    if failed:
        return POD_START_FAILED, _describe_failed_start(decisions, failed[0])
    awaited = [pod for d in decisions.pod_decisions if isinstance(d.action, AwaitEnd) for pod in d.action.older]
    if leaving := describe_leaving(decisions.inputs):
        return _growth(decisions), leaving
    if awaited:
        return _growth(
            decisions
        ), f"the successor of {awaited[0].name} waits for its end (podReplacementPolicy: Failed)"
    return _growth(decisions), _describe_start(decisions)


def _describe_start(decisions: Decisions) -> str:
    """Return what the missing pods do if nothing is wrong."""
    if decisions.training.starts:
        return decisions.training.reason
    if decisions.training.formed:
        return "the other pods are starting"
    if decisions.trained:
        return "the workers are restarting"
    imports = ": each imports the modules of spec.preload first" if decisions.inputs.spec.preload else ""
    return f"the pods are starting{imports}"


def _describe_avoided(node: AvoidedNode) -> str:
    why = "" if node.lost else f": {node.message}"
    return f"{node.name} is avoided {describe_avoidance(node)}{why}"


def describe_avoidance(node: AvoidedNode) -> str:
    """Return how long a node is avoided."""
    return "until its kubelet renews its lease" if node.lost else f"until {timestamp(node.until)}"


def _growth(decisions: Decisions) -> str:
    """Return ScalingUp if the job starts, or if its target rose and has not been reached since."""
    status = decisions.inputs.status
    before = status.conditions.get(ConditionType.FULLY_SCALED)
    raised = status.target is not None and decisions.inputs.spec.target > status.target
    growing = not decisions.trained or raised or (before is not None and before.reason == "ScalingUp")
    return "ScalingUp" if growing else "BelowDesiredAboveMin"


# ---- Restarting ------------------------------------------------------------------------------------------------

_REASON_BY_END = {
    EndReason.WORKER_FAILED: "WorkerFailed",
    EndReason.AGENT_LOST: "AgentLost",
    EndReason.NODE_LEFT: "PodEvicted",
}
"""Keyed by the reason for which a round ended; ends that are not faults are missing."""


def restarting(decisions: Decisions) -> Condition | None:
    """Return whether the workers are down because of a fault; None if no fault has happened yet."""
    before = decisions.inputs.status.conditions.get(ConditionType.RESTARTING)
    if decisions.outcome is not None:
        if before is None and decisions.outcome.succeeded:
            return None
        reason = "WorldFormed" if decisions.outcome.succeeded else "BudgetExhausted"
        return condition(False, reason, "the job has ended")
    if decisions.suspended:
        return None if before is None else condition(False, "Suspended", "the job is suspended")
    last_round = decisions.budget.last_round
    fault = _REASON_BY_END.get(last_round.reason) if last_round else None
    if decisions.training.formed or not decisions.trained:
        if before is None and fault is None:
            return None
        return condition(False, "WorldFormed", "the workers run") if decisions.training.formed else before
    if (failed := _failed_pod(decisions)) is not None and fault in (None, "PodEvicted"):
        return condition(True, "WorkerFailed", f"{describe_record(failed)}; the workers are restarting")
    if fault is None or last_round is None:
        return before
    if fault == "AgentLost" and _node_lost(decisions):
        fault = "NodeLost"
    if last_round.failure is not None:
        fault = REASON_BY_CLASS.get(last_round.failure.kind, fault)
    message = "; ".join(
        filter(None, (last_round.message, describe_leaving(decisions.inputs), "the workers are restarting"))
    )
    return condition(True, fault, message)


def _failed_pod(decisions: Decisions) -> dict[str, Any] | None:
    """Return the record of a pod that is newly charged, and whose end the store has reported, if at all, as a leave of
    its agent; None without one."""
    charged = {
        d.pod.name for d in decisions.pod_decisions if d.pod and isinstance(d.action, ReplacePod) and d.action.charged
    }
    return next((record for record in decisions.budget.charged if record.get("pod") in charged), None)


def _node_lost(decisions: Decisions) -> bool:
    lost = any(isinstance(d.action, ReplacePod) and d.action.lost_at is not None for d in decisions.pod_decisions)
    return lost or any(node.lost for node in decisions.workers.avoided)
