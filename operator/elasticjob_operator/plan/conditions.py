"""Conditions: what is so, why, and what a person can do about it."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob.contract.messages import EndReason, FailureClass
from elasticjob_operator.model.observed import Refusal
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.model.status import DEVICE_UNHEALTHY, NODE_LOST, AvoidedNode, Condition, ConditionType
from elasticjob_operator.plan.budget import Budget
from elasticjob_operator.plan.context import LOST_GRACE_SECONDS, ReconcileContext
from elasticjob_operator.plan.job_end import JobOutcome
from elasticjob_operator.plan.pod_decisions import PodDecision, ReplacePod
from elasticjob_operator.plan.stores import StorePlan
from elasticjob_operator.plan.workers import WorkersPlan
from elasticjob_operator.plan.world import World


@dataclass(frozen=True)
class JobContext:
    """All that conditions are told from."""

    ctx: ReconcileContext
    pod_decisions: tuple[PodDecision, ...]
    workers: WorkersPlan
    store: StorePlan
    world: World
    budget: Budget
    outcome: JobOutcome | None = None

    @property
    def kept_pods(self) -> list[Pod]:
        """Pods that their decisions keep."""
        return [s.pod for s in self.pod_decisions if s.pod is not None and not isinstance(s.action, ReplacePod)]


def condition(yes: bool, reason: str, message: str) -> Condition:
    return Condition("True" if yes else "False", reason, message)


# ---- RendezvousReady -------------------------------------------------------------------------------------------


def rendezvous_ready(f: JobContext) -> Condition:
    """Whether the store serves. A blink of the link says nothing yet."""
    ctx, link = f.ctx, f.ctx.observed.link
    before = ctx.status.conditions.get(ConditionType.RENDEZVOUS_READY)
    same_store = f.store.incarnation == ctx.status.store_incarnation
    if f.outcome is not None:
        return condition(False, "Finished", "the job has ended")
    if f.store.pod is not None and link.connected and same_store:
        return condition(True, "StoreAvailable", f"store {f.store.pod.name} serves")
    was_ready = before is not None and (before.true or before.reason in ("StoreLost", "StoreRescheduled"))
    if f.store.pod is not None and same_store and before is not None and ctx.now < link.since + LOST_GRACE_SECONDS:
        return before
    if not was_ready:
        return condition(False, "StoreStarting", _store_trouble(f) or "the store pod is starting")
    if f.store.incarnation and not (f.store.pod is not None and same_store):
        trouble = _store_trouble(f) or f"store incarnation {f.store.incarnation} is starting"
        return condition(False, "StoreRescheduled", f"{trouble}; training goes on meanwhile")
    if f.store.lost_reason:
        return condition(False, "StoreLost", f.store.lost_reason)
    since = timestamp(link.since)
    message = (
        f"the store has not been heard of since {since}: counts are those of then, and whether workers failed or were "
        "restarted since is not known. Training goes on without a store; failures are repaired once one serves"
    )
    return condition(False, "StoreLost", message)


def _store_trouble(f: JobContext) -> str:
    refusals = f.ctx.observed.refusals
    name = f"{f.ctx.job.name}-rdzv-{f.store.incarnation}"
    if name in refusals:
        return f"the store pod cannot be created: {refusals[name].message}"
    pod = next((p for p in f.ctx.observed.stores if p.incarnation == f.store.incarnation), None)
    if pod is None:
        return ""
    if pod.unschedulable:
        return f"the store pod {pod.name} finds no node: {pod.unschedulable}"
    if pod.image_error:
        return f"the store pod's image cannot be had: {pod.image_error}"
    return f"the store pod {pod.name} does not start: {pod.stuck}" if pod.stuck else ""


# ---- Running ---------------------------------------------------------------------------------------------------


def running(f: JobContext) -> Condition:
    """Whether workers train; if not, the first thing that stands in the way."""
    if f.outcome is not None:
        return condition(False, "Finished", "the job has ended")
    if f.world.formed:
        nodes = _count(f.world.active, "node")
        return condition(True, "WorldFormed", f"{nodes} train with {_count(f.world.size, 'worker')}")
    blocked = _blocked(f)
    if blocked is not None:
        return blocked
    need = f.ctx.spec.min_replicas
    if f.world.rounds > 0:
        return condition(False, "Restarting", f.world.reason or "the workers are being started again")
    here = f.world.ready
    message = f.world.reason or f"{here} of at least {_count(need, 'node')} are here"
    return condition(False, "WaitingForMinReplicas", f"starting: {message}")


def _blocked(f: JobContext) -> Condition | None:
    """What keeps the job below its minimum."""
    refusals = _refusals(f)
    scarce = [p for p in f.kept_pods if p.unschedulable]
    no_image = [p for p in f.kept_pods if p.image_error]
    stuck = [p for p in f.kept_pods if p.stuck]
    usable = len(f.pod_decisions) - len(refusals) - len(scarce) - len(no_image) - len(stuck)
    store = _store_blocked(f)
    if store is not None:
        return store
    if usable >= f.ctx.spec.min_replicas:
        return None
    if refusals:
        worst = refusals[0]
        return condition(False, worst.reason.value, f"{worst.message}. It is tried again by itself")
    if no_image:
        return condition(
            False,
            "ImagePullFailed",
            f"{no_image[0].name}: {no_image[0].image_error}. Correct the image's name, push it, or add "
            "imagePullSecrets to the template; the job goes on by itself once it can be pulled",
        )
    if stuck:
        message = f"{stuck[0].name}: {stuck[0].stuck}. The job goes on by itself once that is put right"
        return condition(False, "PodCreationFailed", message)
    return condition(
        False,
        "Unschedulable",
        f"{usable} of at least {_count(f.ctx.spec.min_replicas, 'node')} found a place; {scarce[0].name}: "
        f"{scarce[0].unschedulable} The job starts by itself once there is room",
    )


def _store_blocked(f: JobContext) -> Condition | None:
    children = f.ctx.observed.children
    named = {f.ctx.job.name: children.nodes, f"{f.ctx.job.name}-rdzv": children.rendezvous}
    taken = [f"Service {name}" for name, child in named.items() if child is not None and not child.ours]
    if children.secret is not None and not children.secret.ours:
        taken.append(f"Secret {f.ctx.job.name}-rdzv")
    if taken:
        message = f"{', '.join(taken)} exists and is not this job's: delete it, or give the job another name"
        return condition(False, "NameTaken", message)
    name = f.ctx.job.name
    own = (f"Service/{name}", f"Service/{name}-rdzv", f"Secret/{name}-rdzv", f"{name}-rdzv-{f.store.incarnation}")
    refusal = next((f.ctx.observed.refusals[name] for name in own if name in f.ctx.observed.refusals), None)
    if refusal is None:
        return None
    return condition(False, refusal.reason.value, f"{refusal.message}. It is tried again by itself")


def _refusals(f: JobContext) -> list[Refusal]:
    names = [fact.pod for fact in f.workers.expected_pods]
    missing = [s for s in f.pod_decisions if s.pod is None]
    named = [f"{f.ctx.job.name}-{s.index}-{s.incarnation}" for s in missing]
    return [f.ctx.observed.refusals[n] for n in dict.fromkeys(named + names) if n in f.ctx.observed.refusals]


# ---- FullyScaled -----------------------------------------------------------------------------------------------


def fully_scaled(f: JobContext) -> Condition:
    """Whether as many nodes train as the job should have. Spares are told of, and never waited for."""
    target = f.ctx.spec.target
    if f.outcome is not None:
        return condition(False, "Finished", "the job has ended")
    spares = f.ctx.spec.spares
    extra = [p for p in f.ctx.observed.workers if p.index >= target + spares and p.end is None]
    if extra or f.world.active > target:
        return condition(False, "ScalingDown", f"down to {_count(target, 'node')}; {len(extra)} still to go")
    if f.world.formed and f.world.active == target:
        told = f"; spares that stand by: {f.world.standby} of {spares}" if spares else ""
        return condition(True, "AtDesiredReplicas", f"all {_count(target, 'node')} train{told}")
    return _short(f, target, f"{f.world.active} of {_count(target, 'node')} train")


def _short(f: JobContext, target: int, counted: str) -> Condition:
    refusals, scarce = _refusals(f), [p for p in f.kept_pods if p.unschedulable]
    if refusals:
        return condition(False, "InsufficientCapacity", f"{counted}; {refusals[0].message}")
    avoided = [node.name for node in f.workers.avoided]
    if scarce and not avoided:
        return condition(False, "InsufficientCapacity", f"{counted}; {scarce[0].name}: {scarce[0].unschedulable}")
    if avoided:
        why = f"; {scarce[0].name}: {scarce[0].unschedulable}" if scarce else ""
        told = "; ".join(map(_avoided, f.workers.avoided))
        return condition(False, "NodeFault", f"{counted}; {told}{why}")
    stuck = [p for p in f.kept_pods if p.image_error or p.stuck]
    if stuck:
        why = stuck[0].image_error or stuck[0].stuck
        return condition(False, "BelowDesiredAboveMin", f"{counted}; {stuck[0].name}: {why}")
    reason = "ScalingUp" if f.world.rounds == 0 or _grows(f, target) else "BelowDesiredAboveMin"
    return condition(False, reason, f"{counted}; the others are starting")


def _avoided(node: AvoidedNode) -> str:
    if node.reason == DEVICE_UNHEALTHY:
        return f"{node.name} is avoided until {timestamp(node.until)}: {node.message}"
    return f"{node.name} is avoided until its kubelet is heard of again"


def _grows(f: JobContext, target: int) -> bool:
    """Whether a higher target is new, or has not been reached since it was."""
    before = f.ctx.status.conditions.get(ConditionType.FULLY_SCALED)
    raised = f.ctx.status.target is not None and target > f.ctx.status.target
    return raised or (before is not None and before.reason == "ScalingUp")


# ---- Restarting ------------------------------------------------------------------------------------------------

_CAUSES = {
    EndReason.WORKER_FAILED: "WorkerFailed",
    EndReason.AGENT_LOST: "AgentLost",
    EndReason.NODE_LEFT: "PodEvicted",
}
_REASONS = {FailureClass.HANG: "HangDetected", FailureClass.DEVICE_UNHEALTHY: "DeviceUnhealthy"}
"""What has a reason of its own, by the class of its cause."""


def restarting(f: JobContext) -> Condition | None:
    """Whether the workers are down for a fault; None while that has never been so."""
    before = f.ctx.status.conditions.get(ConditionType.RESTARTING)
    if f.outcome is not None:
        if before is None and f.outcome.succeeded:
            return None
        reason = "WorldFormed" if f.outcome.succeeded else "BudgetExhausted"
        return condition(False, reason, "the job has ended")
    cause = _CAUSES.get(f.budget.last_round.reason) if f.budget.last_round else None
    if f.world.formed or f.world.rounds == 0:
        if before is None and cause is None:
            return None
        return condition(False, "WorldFormed", "the workers run") if f.world.formed else before
    if cause is None or f.budget.last_round is None:
        return before
    lost = any(isinstance(s.action, ReplacePod) and s.action.lost_at is not None for s in f.pod_decisions)
    avoided = any(node.reason == NODE_LOST for node in f.workers.avoided)
    reason = "NodeLost" if cause == "AgentLost" and (lost or avoided) else cause
    if f.budget.last_round.failure is not None:
        reason = _REASONS.get(f.budget.last_round.failure.kind, reason)
    return condition(True, reason, f"{f.budget.last_round.message}; the workers are started again")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
