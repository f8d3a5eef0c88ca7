"""The four conditions of a job that has not ended: the state, its reason, and what the user can do about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
from elasticjob_operator.plan.context import LOST_GRACE_SECONDS, ReconcileContext
from elasticjob_operator.plan.failure_policy.budget import Budget
from elasticjob_operator.plan.failure_policy.failures import describe_record
from elasticjob_operator.plan.life_cycle.job_end import JobOutcome
from elasticjob_operator.plan.life_cycle.queueing import nodes_without_quota
from elasticjob_operator.plan.life_cycle.suspension import is_suspended, resumes, suspended_condition
from elasticjob_operator.plan.pods.capacity import Capacity, describe_back_off, target_replicas
from elasticjob_operator.plan.pods.cordons import describe_cordon_spares
from elasticjob_operator.plan.pods.node_warnings import describe_leaving
from elasticjob_operator.plan.pods.pod_decisions import (
    AwaitEnd,
    PodDecision,
    ReplacePod,
    did_not_start,
    starts_execution,
)
from elasticjob_operator.plan.pods.start_attempts import Starts
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
from elasticjob_operator.plan.pods.workers import WorkersPlan
from elasticjob_operator.plan.store_pods.operator_reach import describe_unreachable, suspects_itself
from elasticjob_operator.plan.store_pods.stores import StorePlan
from elasticjob_operator.plan.training_state import World


@dataclass(frozen=True)
class JobContext:
    """The inputs of one reconcile and all decisions on the job; status and Events are derived from it."""

    ctx: ReconcileContext
    pod_decisions: tuple[PodDecision, ...]
    workers: WorkersPlan
    store: StorePlan
    world: World
    budget: Budget
    starts: Starts
    capacity: Capacity
    outcome: JobOutcome | None = None
    """None while the job goes on."""

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, or resumes only with the next reconcile."""
        return self.outcome is None and (is_suspended(self.ctx) or resumes(self.ctx))

    @property
    def resumes(self) -> bool:
        """Whether the next execution begins with this reconcile."""
        return self.outcome is None and resumes(self.ctx)

    @property
    def trained(self) -> bool:
        """Whether a round has formed since the job was started or resumed."""
        return self.world.rounds > 0 and not (starts_execution(self.ctx) and self.world.last_round is None)

    @property
    def kept_pods(self) -> list[Pod]:
        """Pods that are not replaced."""
        return [d.pod for d in self.pod_decisions if d.pod is not None and not isinstance(d.action, ReplacePod)]


def condition(status: bool, reason: str, message: str) -> Condition:
    """Return a condition that is True or False."""
    return Condition("True" if status else "False", reason, message)


def _inactive(job: JobContext) -> Condition | None:
    """Return the condition of a job that has ended or is suspended; None of one that runs."""
    if job.outcome is not None:
        return condition(False, "Finished", "the job has ended")
    return condition(False, "Suspended", "the job is suspended") if job.suspended else None


# ---- Suspended -------------------------------------------------------------------------------------------------


def suspended(job: JobContext) -> Condition | None:
    """Return whether the job is suspended; None for one that never was. A job that has ended is not."""
    if job.outcome is None:
        return suspended_condition(job.ctx)
    return _inactive(job) if ConditionType.SUSPENDED in job.ctx.status.conditions else None


# ---- RendezvousReady -------------------------------------------------------------------------------------------


def rendezvous_ready(job: JobContext) -> Condition:
    """Return whether the store serves. A link that has been down for less than the grace period changes nothing."""
    ctx, store, link = job.ctx, job.store, job.ctx.observed.link
    before = ctx.status.conditions.get(ConditionType.RENDEZVOUS_READY)
    same_store = store.incarnation == ctx.status.store_incarnation
    if (inactive := _inactive(job)) is not None:
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
        return condition(False, "StoreStarting", _store_problem(job) or "the store pod is starting")
    if store.incarnation and not (store.pod is not None and same_store):
        problem = _store_problem(job) or f"store pod {store_pod(ctx.job.name, store.incarnation)} is starting"
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


def _store_problem(job: JobContext) -> str:
    """Return the problem that keeps the store pod from starting; empty if none is known."""
    if job.store.incarnation is None:
        return ""
    refusal = job.ctx.observed.refusals.get(store_pod(job.ctx.job.name, job.store.incarnation))
    if refusal is not None:
        return f"the store pod cannot be created: {refusal.message}"
    pod = job.ctx.store_pod(job.store.incarnation)
    if pod is None:
        return ""
    if pod.unschedulable:
        return f"store pod {pod.name} is unschedulable: {pod.unschedulable}"
    if pod.image_error:
        return f"the image of store pod {pod.name} cannot be pulled: {pod.image_error}"
    return f"store pod {pod.name} does not start: {pod.stuck}" if pod.stuck else ""


# ---- Running ---------------------------------------------------------------------------------------------------


def running(job: JobContext) -> Condition:
    """Return whether workers train; if not, the first problem that prevents it. Objects that cannot be read are named
    in any case, and a mistake in the spec that counts for the next pods only."""
    found, problems = _running(job), list(job.ctx.observed.unreadable[:_MAX_UNREADABLE])
    if (mistake := job.ctx.job.spec_error) and _inactive(job) is None and mistake not in found.message:
        problems.append(f"no new pod can be created: {mistake}. Correct the template: {CHANGE}")
    return replace(found, message="; ".join((found.message, *problems)))


_MAX_UNREADABLE = 3
"""Objects that cannot be read and that the condition names."""


def _running(job: JobContext) -> Condition:
    if (inactive := _inactive(job)) is not None:
        return inactive
    if job.world.formed:
        return condition(True, "WorldFormed", describe_world(job.world))
    if job.capacity.retry_at is not None:
        return condition(False, "BackedOff", describe_back_off(job.ctx, job.capacity))
    blocked = _blocked(job)
    if blocked is not None:
        return blocked
    if job.trained:
        return condition(False, "Restarting", job.world.reason or "the workers are restarting")
    nodes = f"{job.world.ready} of at least {with_noun(job.ctx.spec.min_replicas, 'node')} ready"
    message = job.world.reason if job.world.starts else f"starting: {job.world.reason or nodes}"
    if job.starts.in_row:
        failed = f"{with_noun(job.starts.in_row, 'attempt')} to start pods failed"
        message += f"; {failed}: see status.lastFailure"
    return condition(False, "WaitingForMinReplicas", message)


def describe_world(world: World) -> str:
    """Return the size of the running world, for messages."""
    return f"training on {with_noun(world.active, 'node')} with {with_noun(world.size, 'worker')}"


def _blocked(job: JobContext) -> Condition | None:
    """Return the problem that keeps the job below its minimum; None if there is none."""
    store = _store_blocked(job)
    if store is not None:
        return store
    refusals = _refusals(job)
    unschedulable = [p for p in job.kept_pods if p.unschedulable]
    waiting = [p for p in job.kept_pods if p.image_error or p.stuck]
    failed = [p for p in job.kept_pods if did_not_start(p)]
    available = len(job.pod_decisions) - len(refusals) - len(unschedulable) - len(waiting) - len(failed)
    if available >= job.ctx.spec.min_replicas:
        return None
    if refusals:
        return _refused(refusals[0])
    if (problem := describe_waiting(waiting)) is not None:
        return condition(False, *problem)
    if failed:
        return condition(False, POD_START_FAILED, _describe_failed_start(job, failed[0]))
    nodes = f"{available} of at least {with_noun(job.ctx.spec.min_replicas, 'node')} available"
    then = ". The job continues once the cluster has room" if lacks_room(unschedulable[0]) else ""
    return condition(False, UNSCHEDULABLE, f"{nodes}; {describe_unschedulable(unschedulable[0])}{then}")


def _describe_failed_start(job: JobContext, pod: Pod) -> str:
    failure, starts = pod.end.start_failure if pod.end else "", job.starts
    attempts = f"{starts.in_row} of {with_noun(job.ctx.spec.max_start_failures, 'attempt')} in a row failed"
    retry = timestamp(math.ceil(max(starts.retry_at, job.ctx.now)))
    again = f"The operator tries again at {retry}. If the template is wrong, correct it: {CHANGE}"
    return f"{pod.name}: {failure.rstrip('.')}; {attempts}. {again}"


def _refused(refusal: Refusal, field: str = "the template") -> Condition:
    return condition(False, refusal.reason.value, describe_refusal(refusal, field))


def _store_blocked(job: JobContext) -> Condition | None:
    name, observed = job.ctx.job.name, job.ctx.observed
    children = {
        f"Service {nodes_service(name)}": observed.children.nodes,
        f"Service {store_service(name)}": observed.children.rendezvous,
    }
    if gang := gang_child(job.ctx.job, job.ctx.spec):
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
    keys = [f"Secret/{key_secret(job.ctx.job)}", *(child_name.replace(" ", "/") for child_name in children)]
    if job.store.incarnation is not None:
        keys.append(store_pod(name, job.store.incarnation))
    refusal = next((observed.refusals[key] for key in keys if key in observed.refusals), None)
    return None if refusal is None else _refused(refusal, "rendezvous.store")


def _refusals(job: JobContext) -> list[Refusal]:
    """Return the refusals of worker pods."""
    name, refusals = job.ctx.job.name, job.ctx.observed.refusals
    expected = [pod.pod for pod in job.workers.expected_pods]
    missing = [worker_pod(name, d.index, d.incarnation or 0) for d in job.pod_decisions if d.pod is None]
    return [refusals[pod] for pod in dict.fromkeys(expected + missing) if pod in refusals]


# ---- FullyScaled -----------------------------------------------------------------------------------------------


def fully_scaled(job: JobContext) -> Condition:
    """Return whether as many nodes train as the job should have. Missing spares do not make the condition False."""
    if (inactive := _inactive(job)) is not None:
        return inactive
    target, spares, indices = job.ctx.spec.target, job.ctx.spec.spares, frozenset(job.ctx.all_indices)
    surplus = [p for p in job.ctx.observed.workers if p.index not in indices and p.end is None]
    if surplus or job.world.active > target:
        message = f"scaling down to {with_noun(target, 'node')}; pods still to be removed: {len(surplus)}"
        return condition(False, "ScalingDown", message)
    active = f"training on {job.world.active} of {with_noun(target, 'node')}"
    message = active if job.world.formed or job.trained else f"none of {with_noun(target, 'node')} trains yet"
    if job.world.formed and job.world.active == target and (missing := nodes_without_quota(job.ctx)):
        wanted = with_noun(target + missing, "node")
        message = f"training on {target} of {wanted}; queue {job.ctx.job.queue} has quota for {target}"
        return condition(False, "InsufficientCapacity", message)
    if job.world.formed and job.world.active == target:
        standby = f"; standby spares: {job.world.standby} of {spares}" if spares else ""
        return condition(True, "AtDesiredReplicas", f"{message}{standby}{describe_cordon_spares(job.ctx)}")
    reason, why = _shortage(job)
    if job.capacity.scaled_down is not None:
        why += f"; status.targetReplicas is {target_replicas(job.ctx, job.capacity)} until the cluster has room"
    return condition(False, reason, f"{message}; {why}")


def _shortage(job: JobContext) -> tuple[str, str]:
    """Return why fewer nodes train than the job should have: the condition's reason, and a message."""
    if job.capacity.retry_at is not None:
        return "InsufficientCapacity", "the job has given its pods back (see the condition Running)"
    refusals, unschedulable = _refusals(job), [p for p in job.kept_pods if p.unschedulable]
    if refusals:
        return refusal_reason(refusals[0]), describe_refusal(refusals[0])
    unscheduled = [describe_unschedulable(pod) for pod in unschedulable[:1]]
    avoided = [_describe_avoided(node) for node in job.workers.avoided]
    if unscheduled and not avoided:
        return unschedulable_reason(unschedulable[0]), unscheduled[0]
    if avoided:
        return "NodeFault", "; ".join(avoided + unscheduled)
    if job.capacity.scaled_down is not None:
        return "InsufficientCapacity", "the pod that shows whether there is room is being created"
    if (problem := describe_waiting(job.kept_pods)) is not None:
        return problem
    failed = [p for p in job.kept_pods if did_not_start(p)]
    if failed:
        return POD_START_FAILED, _describe_failed_start(job, failed[0])
    awaited = [pod for d in job.pod_decisions if isinstance(d.action, AwaitEnd) for pod in d.action.older]
    if leaving := describe_leaving(job.ctx):
        return _growth(job), leaving
    if awaited:
        return _growth(job), f"the successor of {awaited[0].name} waits for its end (podReplacementPolicy: Failed)"
    return _growth(job), _describe_start(job)


def _describe_start(job: JobContext) -> str:
    """Return what the missing nodes do if nothing is wrong."""
    if job.world.starts:
        return job.world.reason
    if job.world.formed:
        return "the other nodes are starting"
    if job.trained:
        return "the workers are restarting"
    imports = ": each imports the modules of spec.preload first" if job.ctx.spec.preload else ""
    return f"the nodes are starting{imports}"


def _describe_avoided(node: AvoidedNode) -> str:
    why = "" if node.lost else f": {node.message}"
    return f"{node.name} is avoided {describe_avoidance(node)}{why}"


def describe_avoidance(node: AvoidedNode) -> str:
    """Return how long a node is avoided."""
    return "until its kubelet renews its lease" if node.lost else f"until {timestamp(node.until)}"


def _growth(job: JobContext) -> str:
    """Return ScalingUp if the job starts, or if its target rose and has not been reached since."""
    status = job.ctx.status
    before = status.conditions.get(ConditionType.FULLY_SCALED)
    raised = status.target is not None and job.ctx.spec.target > status.target
    growing = not job.trained or raised or (before is not None and before.reason == "ScalingUp")
    return "ScalingUp" if growing else "BelowDesiredAboveMin"


# ---- Restarting ------------------------------------------------------------------------------------------------

_REASON_BY_END = {
    EndReason.WORKER_FAILED: "WorkerFailed",
    EndReason.AGENT_LOST: "AgentLost",
    EndReason.NODE_LEFT: "PodEvicted",
}
"""Keyed by the reason for which a round ended; ends that are no faults are missing."""


def restarting(job: JobContext) -> Condition | None:
    """Return whether the workers are down because of a fault; None if no fault has happened yet."""
    before = job.ctx.status.conditions.get(ConditionType.RESTARTING)
    if job.outcome is not None:
        if before is None and job.outcome.succeeded:
            return None
        reason = "WorldFormed" if job.outcome.succeeded else "BudgetExhausted"
        return condition(False, reason, "the job has ended")
    if job.suspended:
        return None if before is None else condition(False, "Suspended", "the job is suspended")
    last_round = job.budget.last_round
    fault = _REASON_BY_END.get(last_round.reason) if last_round else None
    if job.world.formed or not job.trained:
        if before is None and fault is None:
            return None
        return condition(False, "WorldFormed", "the workers run") if job.world.formed else before
    if (failed := _failed_pod(job)) is not None and fault in (None, "PodEvicted"):
        return condition(True, "WorkerFailed", f"{describe_record(failed)}; the workers are restarting")
    if fault is None or last_round is None:
        return before
    if fault == "AgentLost" and _node_lost(job):
        fault = "NodeLost"
    if last_round.failure is not None:
        fault = REASON_BY_CLASS.get(last_round.failure.kind, fault)
    message = "; ".join(filter(None, (last_round.message, describe_leaving(job.ctx), "the workers are restarting")))
    return condition(True, fault, message)


def _failed_pod(job: JobContext) -> dict[str, Any] | None:
    """Return the record of a pod that is newly charged, and whose end the store has reported, if at all, as one of a
    node that left; None without one."""
    charged = {d.pod.name for d in job.pod_decisions if d.pod and isinstance(d.action, ReplacePod) and d.action.charged}
    return next((record for record in job.budget.charged if record.get("pod") in charged), None)


def _node_lost(job: JobContext) -> bool:
    lost = any(isinstance(d.action, ReplacePod) and d.action.lost_at is not None for d in job.pod_decisions)
    return lost or any(node.lost for node in job.workers.avoided)
