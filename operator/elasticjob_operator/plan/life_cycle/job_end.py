"""The end of a job: its outcome (SuccessCriteriaMet or FailureTarget), then its pods end, then Complete or Failed.

The outcome is final: from then on no pod is created, and nothing that happens later changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elasticjob._runtime.contract.failures.failure_rules import describe_rule
from elasticjob._runtime.contract.failures.failure_text import HANG_FAILS_THE_JOB
from elasticjob._runtime.contract.messages import FailureClass, HangAction, Outcome, SuccessPolicy
from elasticjob._runtime.contract.names import FINAL_EXCEPTIONS
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import DeleteGang, DeleteJob, DeletePod, DeleteService, EventRecord
from elasticjob_operator.manifests.names import nodes_service, store_service
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import integer, moment, timestamp
from elasticjob_operator.model.job.spec import CleanPods
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.plan.context import STORE_GRACE_SECONDS, Actions, ReconcileContext
from elasticjob_operator.plan.failure_policy import failures
from elasticjob_operator.plan.failure_policy.budget import Budget
from elasticjob_operator.plan.pods.start_attempts import StartAttempts, gives_up
from elasticjob_operator.plan.pods.terminations import is_stuck, may_force, next_checks
from elasticjob_operator.plan.training_state import TrainingState

LEAVE_GRACE = 10.0
"""Seconds after the outcome in which agents receive it and exit by themselves; the pods that still run are deleted."""

_ENDED = "the job has ended"
_RUN_AGAIN = "delete the job and apply it again, or apply it under a new name"


@dataclass(frozen=True)
class JobOutcome:
    """How the job ends."""

    succeeded: bool
    reason: str
    message: str
    since: float
    """When the outcome was first known, Unix seconds."""
    failure: dict[str, Any] | None = None
    """The record of the root cause, if status may not include it yet."""


def evaluate_outcome(
    ctx: ReconcileContext, training: TrainingState, budget: Budget, starts: StartAttempts
) -> JobOutcome | None:
    """Return the outcome: the one in status if there is one, else a new one; None while the job goes on."""
    declared = declared_outcome(ctx)
    if declared is not None:
        return declared
    if training.outcome is Outcome.SUCCEEDED:
        return _succeeded(ctx, training)
    if training.outcome is Outcome.FAILED or budget.exhausted or budget.failed_by_rule:
        failed = _failed(ctx, budget)
        return replace(failed, message=failed.message + _source(training))
    if (deadline := deadline_at(ctx)) is not None and ctx.now >= deadline:
        limit = f"spec.activeDeadlineSeconds is {ctx.spec.active_deadline}"
        message = f"the job has run since {timestamp(started(ctx))}, and {limit}. {_advise('set a longer one')}"
        return JobOutcome(False, "DeadlineExceeded", message, ctx.now)
    unstarted = gives_up(ctx, starts)
    return None if unstarted is None else _not_started(ctx, starts, unstarted)


def started(ctx: ReconcileContext) -> float:
    """Return when the execution started, Unix seconds of the operator that started it; now if status does not say."""
    return moment(ctx.status.raw, "startTime") or ctx.now


def deadline_at(ctx: ReconcileContext) -> float | None:
    """Return when the execution must have ended, Unix seconds; None without a deadline, or while it is suspended."""
    if ctx.spec.active_deadline is None or ctx.spec.suspend or ctx.status.is_true(ConditionType.SUSPENDED):
        return None
    return started(ctx) + ctx.spec.active_deadline


def expire(ctx: ReconcileContext) -> Actions:
    """Delete the job itself once it has been finished for ttlSecondsAfterFinished."""
    ended, ttl = moment(ctx.status.raw, "completionTime"), ctx.spec.ttl_after_finished
    if ttl is None or ended is None or not ctx.status.terminal:
        return Actions()
    if ctx.now < ended + ttl:
        return Actions(requeue_at=(ended + ttl,))
    return Actions((DeleteJob(ctx.job.uid, f"it has been finished for {with_noun(ttl, 'second')}"),))


def _source(training: TrainingState) -> str:
    """Return the addition to the message of an outcome that a pod declared while the store was unavailable."""
    if not training.outcome_pod:
        return ""
    return (
        f" (according to the termination message of {training.outcome_pod}: restarts that only the store knew of are "
        "not counted)"
    )


def declared_outcome(ctx: ReconcileContext) -> JobOutcome | None:
    """Return the outcome that status already declares, or None."""
    for kind, succeeded in _OUTCOME_CONDITIONS:
        condition = ctx.status.conditions.get(kind)
        if condition is not None and condition.true:
            # Another operator, on another host, may have written the condition's time.
            since = condition.since if ctx.observed.outcome_seen is None else ctx.observed.outcome_seen
            return JobOutcome(succeeded, condition.reason, condition.message, since)
    return None


_OUTCOME_CONDITIONS = (
    (ConditionType.SUCCESS_CRITERIA_MET, True), (ConditionType.COMPLETE, True),
    (ConditionType.FAILURE_TARGET, False), (ConditionType.FAILED, False),
)  # fmt: skip
"""Conditions that declare an outcome, and whether it is a success."""


def _succeeded(ctx: ReconcileContext, training: TrainingState) -> JobOutcome:
    if ctx.spec.success_policy is SuccessPolicy.ANY:
        message = f"all workers of one pod exited with code 0, and successPolicy is Any{_source(training)}"
        return JobOutcome(True, "SuccessPolicy", message, ctx.now)
    message = f"every worker of the last round exited with code 0{_source(training)}"
    return JobOutcome(True, "AllAgentsSucceeded", message, ctx.now)


def _failed(ctx: ReconcileContext, budget: Budget) -> JobOutcome:
    record = budget.failed_by_rule or _root_cause(ctx, budget)
    cause = f"; last failure: {failures.describe_record(record)}" if record else ""
    matched = _matched_rule(ctx, budget)
    hung = record is not None and record.get("class") == FailureClass.HANG.value
    if ctx.spec.hang_action is HangAction.FAIL_JOB and hung:
        matched = f"{HANG_FAILS_THE_JOB}{cause}"
    if matched is not None and matched.startswith(HANG_FAILS_THE_JOB):
        message = f"{matched}. {_advise('correct the cause, or change spec.hangPolicy')}"
        return JobOutcome(False, "FailurePolicyRule", message, ctx.now, record)
    if matched is not None:
        changed = "spec.logRules" if matched.startswith("log rule") else "spec.failurePolicy.rules"
        advice = _advise(f"correct the cause, or change {changed}")
        message = f"{matched}. The rule has the action FailJob. {advice}"
        return JobOutcome(False, "FailurePolicyRule", message, ctx.now, record)
    if (final := FINAL_EXCEPTIONS.get(str(record.get("exception", "")) if record else "")) is not None:
        message = f"no restart can mend this{cause}. {_advise('change the command as the message says')}"
        return JobOutcome(False, final, message, ctx.now, record)
    within = f" within {ctx.spec.restart_window} s" if ctx.spec.restart_window else ""
    restarts = f"{budget.counted} of {with_noun(ctx.spec.max_restarts, 'restart')}{within}"
    advice = _advise("correct the cause, or allow more restarts with spec.failurePolicy.maxRestarts")
    message = f"workers failed after {restarts}{cause}. See status.lastFailure. {advice}"
    return JobOutcome(False, "MaxRestartsExceeded", message, ctx.now, record)


def _matched_rule(ctx: ReconcileContext, budget: Budget) -> str | None:
    """Return which rule with the action FailJob matched which failure, or that training hung; None if none did.

    If the store was lost after it had declared the outcome, the agents' termination messages have its sentence.
    """
    if (record := budget.failed_by_rule) is not None:
        return f"{describe_rule(record['rule'])} matched: {failures.describe_record(record)}"
    ends = (p.end.termination for p in ctx.observed.workers if p.end is not None and p.end.termination is not None)
    declared = (t for t in ends if t.outcome is Outcome.FAILED and t.reason == "FailurePolicyRule")
    return next((t.message for t in declared), None)


def _not_started(ctx: ReconcileContext, starts: StartAttempts, pod: Pod) -> JobOutcome:
    cause = failures.describe_record(failures.start_record(pod, ctx.now))
    attempts = with_noun(starts.in_row, "attempt")
    advice = _advise("correct the cause, or allow more attempts with spec.failurePolicy.maxStartFailures")
    message = f"pods did not start in {attempts} in a row; last failure: {cause}. {advice}"
    return JobOutcome(False, "MaxStartFailuresExceeded", message, ctx.now)


def _advise(change: str) -> str:
    """Return how to run the job again after a change of its manifest."""
    return f"A finished job does not run again: {change}, then {_RUN_AGAIN}"


def _root_cause(ctx: ReconcileContext, budget: Budget) -> dict[str, Any] | None:
    """Return the newly charged failure, else the coordinator's, else one from a termination message, else the last
    failure in status."""
    if budget.charged:
        return budget.charged[-1]
    terminations = [p.end.termination.failure for p in ctx.observed.workers if p.end and p.end.termination]
    failure = next(filter(None, [ctx.report.failure if ctx.report else None, *terminations]), None)
    if failure is not None:
        return failures.worker_record(failure, ctx.node_of(failure.pod))
    last = ctx.status.raw.get("lastFailure")
    return dict(last) if isinstance(last, dict) else None


def all_workers_ended(ctx: ReconcileContext) -> bool:
    """Return whether every worker pod has ended, or is stuck in deletion."""
    return not _unended_workers(ctx)


def _unended_workers(ctx: ReconcileContext) -> list[Pod]:
    return [pod for pod in ctx.observed.workers if pod.end is None and not is_stuck(ctx, pod)]


def remove_pods(ctx: ReconcileContext, outcome: JobOutcome, *, declared: bool) -> Actions:
    """Delete running pods; ended pods stay for their logs. The store is deleted last: it sends agents the outcome.

    `declared`: the coordinator or a pod has declared the outcome, so agents are about to exit by themselves.
    """
    deadline = outcome.since + LEAVE_GRACE if declared else ctx.now
    running = [p for p in ctx.observed.workers if p.deleting is None and (p.end is None or p.phase == "Running")]
    if ctx.spec.clean_pods is CleanPods.NONE:
        running = []  # agents end with the outcome that the store sends them
    waiting = [p for p in running if ctx.now < deadline and _may_exit(p)]
    down = [p for p in ctx.observed.workers if p.deleting is not None and p.end is None and may_force(ctx, p)]
    actions = Actions(
        (
            *(DeletePod(p.name, p.uid, "the kubelet of its Node is down", force=True) for p in down),
            *(DeletePod(p.name, p.uid, _ENDED) for p in running if p not in waiting),
        )
    )
    if waiting:
        actions += Actions(requeue_at=(deadline,))
    if unended := _unended_workers(ctx):
        return actions + Actions(requeue_at=next_checks(ctx, unended))
    return actions + delete_store_and_services(ctx, _ENDED) + _delete_ended(ctx)


def _may_exit(pod: Pod) -> bool:
    """Return whether the pod's agent runs or may run soon: a short job may end before the kubelet reports Running."""
    return bool(pod.node) and not pod.image_error and not pod.stuck


def _delete_ended(ctx: ReconcileContext) -> Actions:
    """Delete the ended pods too, with cleanPodPolicy All, once status has the job's end."""
    if ctx.spec.clean_pods is not CleanPods.ALL or not ctx.status.terminal:
        return Actions()
    return Actions(tuple(DeletePod(p.name, p.uid, _ENDED) for p in ctx.observed.workers if p.deleting is None))


def delete_store_and_services(ctx: ReconcileContext, why: str) -> Actions:
    """Delete the stores, and the Services and the gang object that belong to the job."""
    children, name = ctx.observed.children, ctx.job.name
    stores = [p for p in ctx.observed.stores if p.deleting is None]
    services = ((nodes_service(name), children.nodes), (store_service(name), children.rendezvous))
    gang = children.gang
    return Actions(
        actions=(
            *(DeletePod(p.name, p.uid, why, grace=STORE_GRACE_SECONDS) for p in stores),
            *(DeleteService(service, child.uid) for service, child in services if child is not None and child.ours),
            *((DeleteGang(gang.uid),) if gang is not None and gang.ours else ()),
        )
    )


def outcome_event(outcome: JobOutcome) -> EventRecord:
    """Return the Event of the job's end."""
    if outcome.succeeded:
        return EventRecord("Completed", outcome.message, key="end")
    return EventRecord(outcome.reason, outcome.message, key="end", warning=True)


def changed_event(ctx: ReconcileContext) -> tuple[EventRecord, ...]:
    """Return the Event of a finished job whose spec has changed since the last status."""
    generation = ctx.job.generation
    if generation <= integer(ctx.status.raw, "observedGeneration"):
        return ()
    message = (
        "Only changes of ttlSecondsAfterFinished and cleanPodPolicy have an effect on a finished job: it does not run "
        "again. To run it again, delete it and apply it again, or apply it under a new name"
    )
    return (EventRecord("FinishedJobChanged", message, key=str(generation)),)
