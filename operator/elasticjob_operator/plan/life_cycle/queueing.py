"""A job with a queue of Kueue: when it may have pods, how many, and what happens to its Workload.

Kueue decides when a job is admitted, on how many nodes, and when it is evicted. The operator suspends a job that is not
admitted, without writing `spec.suspend`: that field stays the user's. It gives the quota of an evicted job back once
all its pods have ended, so that Kueue can admit it again.

A job with the annotation `kueue.x-k8s.io/elastic-job` asks for another size while it is admitted: a second Workload
replaces the first one if the job grows, and the first one shrinks in place.

A job with the annotation `elasticjob.dev/step-priority-class` shrinks where it would be evicted: its Workload asks for
its minimum only, and steps ask for the other pods (`queue_steps`).
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import allowed_size
from elasticjob_operator.actions import (
    Action,
    CreateStep,
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    MarkPodsReady,
    ReclaimPods,
    ReleaseQuota,
    StepAction,
    UpdateWorkload,
)
from elasticjob_operator.manifests import asks_for, step_name, workload_child, workload_names
from elasticjob_operator.model.cluster.workload import Workload, WorkloadCondition
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.model.observed import ELASTIC_ANNOTATION, STEP_PRIORITY_ANNOTATION, Observed
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.life_cycle.job_end import JobOutcome, all_workers_ended
from elasticjob_operator.plan.life_cycle.queue_steps import (
    MOST_STEPS,
    Demand,
    admitted_pods,
    describe_steps,
    plan_steps,
)
from elasticjob_operator.plan.training_state import TrainingState


def admitted_spec(observed: Observed, spec: JobSpec) -> JobSpec:
    """Return the spec with as many nodes as the queue has admitted at most; first it does without spares.

    While that is unknown, the job has as many as it was to have at the last status write at most.
    """
    workload, status = observed.queue.workload, observed.job.status
    if not observed.job.queue:
        return spec
    if observed.queue.unknown and status.target is not None:
        # What the cluster had no room for was admitted too.
        known = status.target if status.scaled_down is None else status.scaled_down.target
        target = min(spec.target, max(spec.min_replicas, known))
        return replace(spec, target=target, spares=min(spec.spares, len(status.spares)))
    if workload is None or workload.pods_with_quota is None:
        return spec
    with_quota = admitted_pods(workload, observed.queue.steps) if _uses_steps(observed) else workload.pods_with_quota
    room = max(spec.min_replicas, with_quota)
    target = allowed_size(min(spec.target, room), spec.min_replicas, spec.increment)
    return replace(spec, target=target, spares=min(spec.spares, room - target))


def _uses_steps(observed: Observed) -> bool:
    """Return whether the job may have pods for its steps. A job that has lost the annotation gives them back."""
    return bool(observed.job.step_priority)


def waits_for_queue(ctx: ReconcileContext) -> bool:
    """Return whether the job may have no pods because its queue has not admitted it, or has evicted it.

    An operator that cannot read Workloads, or may not, leaves queued jobs queued and running jobs running. A running
    job does not grow then (`admitted_spec`).
    """
    queue = ctx.observed.queue
    if not ctx.job.queue:
        return False
    idle = _is_idle(ctx)
    if queue.unknown or (idle and ctx.job.queue_conflict):
        return idle
    workload = queue.workload
    return workload is None or not workload.admitted or is_outdated(ctx) or (idle and workload.has_topology)


def _is_idle(ctx: ReconcileContext) -> bool:
    return not ctx.status.execution_attempts or ctx.status.is_true(ConditionType.SUSPENDED)


def is_outdated(ctx: ReconcileContext) -> bool:
    """Return whether the Workload is in another queue than the job is now, or asks for pods of another template.

    Its quota must not serve for them: they may need more. The Workload of an older operator does not say its template.
    With steps, it may also ask for fewer pods than the job needs: steps may go at any time.
    """
    workload = ctx.observed.queue.workload
    if workload is None:
        return False
    return (
        _lacks_minimum(ctx, workload)
        or workload.queue != ctx.job.queue
        or workload.template not in ("", ctx.job.template_digest)
    )


def _lacks_minimum(ctx: ReconcileContext, workload: Workload) -> bool:
    return _uses_steps(ctx.observed) and workload.count < ctx.spec.min_replicas


def has_left_queue(ctx: ReconcileContext) -> bool:
    """Return whether the pods of this execution use quota of a queue that the job has left."""
    guarded = ctx.status.guarded
    if guarded is None or guarded.execution != ctx.status.execution_attempts:
        return False
    return bool(guarded.queue) and guarded.queue != ctx.job.queue


def nodes_without_quota(ctx: ReconcileContext) -> int:
    """Return how many nodes of the spec's target the queue has not admitted."""
    return 0 if ctx.job.spec is None else ctx.job.spec.target - ctx.spec.target


def plan_workload(ctx: ReconcileContext, training: TrainingState, outcome: JobOutcome | None) -> Actions:
    """Return the actions on the job's own Workloads, one at most, and on those of its steps."""
    action = _delete_other(ctx, outcome) or _decide_workload(ctx, training, outcome)
    return Actions((*(() if action is None else (action,)), *_decide_steps(ctx, training, outcome)))


def _decide_steps(ctx: ReconcileContext, training: TrainingState, outcome: JobOutcome | None) -> tuple[StepAction, ...]:
    queue, used = ctx.observed.queue, _uses_steps(ctx.observed)
    if queue.unknown or not (used or queue.steps):
        return ()
    spec, live = ctx.job.spec or ctx.spec, [pod for pod in ctx.observed.workers if pod.end is None]
    demand = Demand(
        queue=ctx.job.queue,
        template=ctx.job.template_digest,
        priority_class=ctx.job.step_priority,
        minimum=spec.min_replicas,
        maximum=spec.max_replicas + spec.spares,
        wanted=_wanted(ctx) if used else 0,
        live=len(live),
        running=sum(pod.phase == "Running" and pod.live for pod in live),
        trains=training.formed,
        increment=spec.increment,
        is_over=_is_over(ctx, outcome),
    )
    due = plan_steps(queue.workload, queue.steps, demand)
    return tuple(a for a in due if not isinstance(a, CreateStep) or ctx.may_create(_step_child(ctx, a.index)))


def _step_child(ctx: ReconcileContext, index: int) -> str:
    return workload_child(step_name(ctx.job, index))


def _delete_other(ctx: ReconcileContext, outcome: JobOutcome | None) -> Action | None:
    """Delete the Workload that was replaced, or one that replaces none any more."""
    queue = ctx.observed.queue
    if queue.replaced is not None:
        return DeleteWorkload(queue.replaced.name, queue.replaced.uid)
    if queue.replacement is None or queue.workload is None:
        return None
    grows = queue.workload.admitted and _wanted(ctx) > queue.workload.count
    if grows and ctx.job.queue_elastic and not _is_over(ctx, outcome):
        return None
    return DeleteWorkload(queue.replacement.name, queue.replacement.uid)


def _decide_workload(ctx: ReconcileContext, training: TrainingState, outcome: JobOutcome | None) -> Action | None:
    workload = ctx.observed.queue.workload
    if ctx.observed.queue.malformed:
        return None  # it has the name, and may hold quota
    if workload is None:
        # The pods of an earlier execution still use their quota.
        due = outcome is None and waits_for_queue(ctx) and not _is_over(ctx, outcome) and all_workers_ended(ctx)
        return _create(ctx, workload_names(ctx.job)[0]) if due else None
    return _end(ctx, workload, outcome) if _is_over(ctx, outcome) else _change(ctx, workload, training)


def _create(ctx: ReconcileContext, name: str, before: Workload | None = None) -> Action | None:
    if not ctx.may_create(workload_child(name)):
        return None
    return CreateWorkload(name, ("", "") if before is None else (before.name, before.uid))


def _wanted(ctx: ReconcileContext) -> int:
    """Return how many worker pods the spec asks for, whatever the queue has admitted."""
    return (ctx.job.spec or ctx.spec).settings.desired_pods


def _is_over(ctx: ReconcileContext, outcome: JobOutcome | None) -> bool:
    """Return whether the job needs its Workload no more."""
    held = ctx.job.queue_conflict and _is_idle(ctx)
    return outcome is not None or ctx.spec.suspend or not ctx.job.queue or held


def _end(ctx: ReconcileContext, workload: Workload, outcome: JobOutcome | None) -> Action | None:
    """A finished job's Workload stays, for its record; that of a job that the user suspends goes with its pods."""
    delete = DeleteWorkload(workload.name, workload.uid)
    if not all_workers_ended(ctx) and (ctx.job.queue or has_left_queue(ctx)):
        return None  # its pods still use the quota
    if not ctx.job.queue or outcome is None:
        return delete
    if workload.is_true(WorkloadCondition.FINISHED):
        return None
    return FinishWorkload(outcome.succeeded, outcome.message)


def _change(ctx: ReconcileContext, workload: Workload, training: TrainingState) -> Action | None:
    if workload.is_true(WorkloadCondition.FINISHED):
        return None
    if workload.reserved and is_outdated(ctx):
        # Its pod sets may not change while it has quota. Without its pods the job is queued again.
        return DeleteWorkload(workload.name, workload.uid) if all_workers_ended(ctx) else None
    if workload.is_true(WorkloadCondition.EVICTED) and workload.reserved:
        return ReleaseQuota() if all_workers_ended(ctx) else None
    if not workload.reserved and not asks_for(workload, ctx.job, ctx.spec):
        return UpdateWorkload(workload.name, workload.uid)
    if not workload.admitted:
        return None
    if (ready := _pods_ready(ctx, workload, training)) is not None:
        return MarkPodsReady(ready)
    return _resize(ctx, workload) if ctx.job.queue_elastic else _reclaim(ctx, workload)


def _pods_ready(ctx: ReconcileContext, workload: Workload, training: TrainingState) -> bool | None:
    """Return the new value of the condition PodsReady; None if it stays.

    Kueue may evict a job whose PodsReady stays False. So it becomes False only where fewer pods run than the job needs,
    and never while a round trains, while a store is replaced, or while a job ends whose pods have begun to succeed.
    """
    marked = workload.is_true(WorkloadCondition.PODS_READY)
    if training.formed:
        return None if marked else True
    if any(pod.end is not None and pod.end.exit_code == 0 for pod in ctx.current_pods):
        return None
    running = sum(pod.phase == "Running" and pod.live for pod in ctx.current_pods)
    return False if marked and running < ctx.spec.min_replicas else None


def _reclaim(ctx: ReconcileContext, workload: Workload) -> Action | None:
    """Give the quota of pods back that the job does not want any more, once they have ended."""
    live = sum(pod.end is None for pod in ctx.observed.workers)
    used = max(_wanted(ctx), live)
    return ReclaimPods(workload.count - used) if used < (workload.pods_with_quota or 0) else None


def _resize(ctx: ReconcileContext, workload: Workload) -> Action | None:
    """Ask for another number of pods while the job is admitted. The quota of pods that go is free once they have."""
    wanted, replacement = _wanted(ctx), ctx.observed.queue.replacement
    if wanted > workload.count and replacement is None:
        return _create(ctx, next(name for name in workload_names(ctx.job) if name != workload.name), workload)
    if wanted > workload.count and replacement is not None:
        outdated = not replacement.reserved and replacement.count != wanted
        return UpdateWorkload(replacement.name, replacement.uid) if outdated else None
    live = sum(pod.end is None for pod in ctx.observed.workers)
    return UpdateWorkload(workload.name, workload.uid) if live <= wanted < workload.count else None


def describe_eviction(ctx: ReconcileContext) -> str:
    """Return that the queue has evicted the job, and why; empty if it has not."""
    workload = ctx.observed.queue.workload
    evicted = workload.conditions.get(WorkloadCondition.EVICTED) if workload else None
    if evicted is None or not evicted.true:
        return ""
    return f"queue {ctx.job.queue} has evicted the job ({evicted.reason}: {evicted.message})"


def describe_quota(ctx: ReconcileContext) -> str:
    """Return for how many pods the queue has admitted a running job, and why not for more if it is known."""
    queue = ctx.observed.queue
    if not _uses_steps(ctx.observed) or queue.workload is None:
        return f"queue {ctx.job.queue} has quota for {ctx.spec.target}"
    described = describe_steps(queue.workload, queue.steps, _wanted(ctx))
    refused = (ctx.observed.refusals.get(_step_child(ctx, index)) for index in range(MOST_STEPS))
    problem = next((refusal.message for refusal in refused if refusal is not None), "")
    return f"{described}; a step cannot be created: {problem}" if problem else described


def describe_wait(ctx: ReconcileContext) -> str:
    """Return what a job without pods waits for, in Kueue's own words where there are any."""
    workload, child = ctx.observed.queue.workload, workload_child(workload_names(ctx.job)[0])
    refusal = ctx.observed.refusals.get(child)
    if ctx.job.queue_conflict:
        return (
            f"the job has no pods as long as it has both annotations {ELASTIC_ANNOTATION} and "
            f"{STEP_PRIORITY_ANNOTATION}: remove one of them"
        )
    until = f"the job has no pods until queue {ctx.job.queue} admits it"
    if ctx.observed.queue.malformed:
        problem = next(iter(ctx.observed.unreadable), "its Workload cannot be read")
        return f"{until}, and that is unknown: {problem}. Correct or delete the Workload"
    if workload is None:
        return f"{until}, and its Workload cannot be created: {refusal.message}" if refusal else until
    if workload.is_true(WorkloadCondition.FINISHED):
        return f"{until}, and Workload {workload.name} is Finished: delete it to queue the job again"
    if is_outdated(ctx) and workload.reserved:
        other = "is in another queue" if workload.queue != ctx.job.queue else "asks for pods of another template"
        if _lacks_minimum(ctx, workload):
            other = "asks for fewer pods than spec.elasticPolicy.minReplicas"
        return f"{until}: Workload {workload.name} {other}, and is replaced"
    if workload.has_topology:
        return (
            f"queue {ctx.job.queue} has assigned the job's pods to a topology (Workload {workload.name}), which "
            "elasticjob cannot honour: use a ResourceFlavor without topologyName"
        )
    if not workload.active:
        return f"{until}, and Workload {workload.name} is deactivated: set its spec.active to true"
    pending = workload.conditions.get(WorkloadCondition.QUOTA_RESERVED)
    why = pending.message if pending is not None and not pending.true else ""
    return f"{until} (Workload {workload.name})" + (f": {why}" if why else "")
