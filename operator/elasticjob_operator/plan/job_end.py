"""The end of a job: the verdict (SuccessCriteriaMet or FailureTarget), then the pods end, then Complete or Failed.

Terminal is final: from the verdict on no pod is made, and nothing that happens later changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elasticjob.contract.messages import FailureClass, HangAction, Outcome
from elasticjob_operator.actions import DeletePod, DeleteService, EventRecord
from elasticjob_operator.manifests.names import nodes_service, store_service
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.status import ConditionType
from elasticjob_operator.plan import failures
from elasticjob_operator.plan.budget import Budget
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.world import World

LEAVE_GRACE = 10.0
"""Seconds from the verdict in which agents hear of it and exit by themselves; what runs then is deleted."""
STUCK_GRACE = 30.0
"""Seconds past its grace after which a pod that is still being deleted no longer holds the job's end."""


@dataclass(frozen=True)
class JobOutcome:
    """How the job ends. `since` is when that was known, Unix seconds."""

    succeeded: bool
    reason: str
    message: str
    since: float
    failure: dict[str, Any] | None = None
    """The root cause, where it is new to status."""


def evaluate_outcome(ctx: ReconcileContext, world: World, budget: Budget) -> JobOutcome | None:
    """The verdict, from status where it has been given before."""
    given = declared_outcome(ctx)
    if given is not None:
        return given
    if world.outcome is Outcome.SUCCEEDED:
        message = f"every worker of the last round exited with 0{_by_whom(world)}"
        return JobOutcome(True, "AllAgentsSucceeded", message, ctx.now)
    if world.outcome is Outcome.FAILED or budget.exhausted:
        failed = _failed(ctx, budget)
        return replace(failed, message=failed.message + _by_whom(world))
    return None


def _by_whom(world: World) -> str:
    """What is not known where the store cannot be asked."""
    if not world.outcome_pod:
        return ""
    return f" (by the word of {world.outcome_pod}: restarts that only the store knew of are not counted)"


def declared_outcome(ctx: ReconcileContext) -> JobOutcome | None:
    """The verdict that status holds already."""
    for kind, success in _VERDICTS:
        given = ctx.status.conditions.get(kind)
        if given is not None and given.true:
            return JobOutcome(success, given.reason, given.message, given.since)
    return None


_VERDICTS = (
    (ConditionType.SUCCESS_CRITERIA_MET, True), (ConditionType.COMPLETE, True),
    (ConditionType.FAILURE_TARGET, False), (ConditionType.FAILED, False),
)  # fmt: skip


def _failed(ctx: ReconcileContext, budget: Budget) -> JobOutcome:
    record = _root_cause(ctx, budget)
    told = f"; last: {failures.describe_record(record)}" if record else ""
    if ctx.spec.hang_action is HangAction.FAIL_JOB and record and record.get("class") == FailureClass.HANG.value:
        message = f"hangPolicy.action is FailJob, and training stood still{told}"
        return JobOutcome(False, "FailurePolicyRule", message, ctx.now, record)
    limit = ctx.spec.max_restarts
    message = (
        f"failed once more after {budget.counted} of {limit} restarts{told}. "
        "See status.lastFailure; correct the cause and apply the job under a new name, "
        "or allow more with spec.failurePolicy.maxRestarts"
    )
    return JobOutcome(False, "MaxRestartsExceeded", message, ctx.now, record)


def _root_cause(ctx: ReconcileContext, budget: Budget) -> dict[str, Any] | None:
    """The coordinator's word, else what an agent wrote before it ended, else the last failure that was charged."""
    if budget.charged:
        return budget.charged[-1]
    said = [p.end.termination.failure for p in ctx.observed.workers if p.end and p.end.termination]
    known = next(filter(None, [ctx.report.failure if ctx.report else None, *said]), None)
    if known is not None:
        return failures.worker_record(known, ctx.node_of(known.pod))
    last = ctx.status.raw.get("lastFailure")
    return dict(last) if isinstance(last, dict) else None


def all_workers_ended(ctx: ReconcileContext) -> bool:
    """Whether every worker pod has ended, as far as it can."""
    return all(_ended(ctx, pod) for pod in ctx.observed.workers)


def _ended(ctx: ReconcileContext, pod: Pod) -> bool:
    stuck = pod.deleting is not None and (ctx.now > pod.deleting + STUCK_GRACE or ctx.kubelet_gone(pod.node))
    return pod.end is not None or stuck


def remove_pods(ctx: ReconcileContext, verdict: JobOutcome, *, told: bool) -> Actions:
    """Take away what runs; ended pods stay for their logs. The store goes last: agents learn the verdict from it.

    `told`: the coordinator has declared the end, so agents are about to exit by themselves.
    """
    patience = verdict.since + LEAVE_GRACE if told else ctx.now
    running = [p for p in ctx.observed.workers if p.deleting is None and (p.end is None or p.phase == "Running")]
    waited = [p for p in running if ctx.now < patience and _may_end_by_itself(p)]
    todo = Actions(tuple(DeletePod(p.name, p.uid, "the job has ended") for p in running if p not in waited))
    if waited:
        todo += Actions(requeue_at=(patience,))
    if not all_workers_ended(ctx):
        return todo + Actions(requeue_at=(ctx.now + 5.0,))
    return todo + _take_down_store(ctx)


def _may_end_by_itself(pod: Pod) -> bool:
    """Its agent runs, or will in a moment: the kubelet may be slower to say so than a short job is to end."""
    return bool(pod.node) and not pod.image_error and not pod.stuck


def _take_down_store(ctx: ReconcileContext) -> Actions:
    children, name = ctx.observed.children, ctx.job.name
    stores = [p for p in ctx.observed.stores if p.deleting is None]
    services = ((nodes_service(name), children.nodes), (store_service(name), children.rendezvous))
    return Actions(
        actions=(
            *(DeletePod(p.name, p.uid, "the job has ended") for p in stores),
            *(DeleteService(service, child.uid) for service, child in services if child is not None and child.ours),
        )
    )


def outcome_event(verdict: JobOutcome) -> EventRecord:
    """The Event of the job's end."""
    if verdict.succeeded:
        return EventRecord("Completed", verdict.message, key="end")
    return EventRecord(verdict.reason, verdict.message, key="end", warning=True)
