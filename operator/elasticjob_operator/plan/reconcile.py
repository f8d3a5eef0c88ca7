"""Decide on one job: combine the decisions of the other modules into a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob._runtime.contract.messages import Finish, OperatorView, Outcome
from elasticjob_operator.actions import (
    Action,
    EventRecord,
)
from elasticjob_operator.manifests.names import attempt
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.job.status import Condition, ConditionType
from elasticjob_operator.model.observed import Job, Observed
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.failure_policy.budget import Budget, charged_rounds, plan_budget, unchanged_budget
from elasticjob_operator.plan.job_status import conditions
from elasticjob_operator.plan.job_status.decisions import Decisions
from elasticjob_operator.plan.job_status.event_records import event_records
from elasticjob_operator.plan.job_status.next_status import (
    current_conditions,
    next_status,
    same_status,
    write_delay,
    written_condition,
)
from elasticjob_operator.plan.job_status.stages import finished_stages
from elasticjob_operator.plan.life_cycle import job_end
from elasticjob_operator.plan.life_cycle.children import plan_children
from elasticjob_operator.plan.life_cycle.evictions import answer_evictions
from elasticjob_operator.plan.life_cycle.key_ids import with_key_id
from elasticjob_operator.plan.life_cycle.policies import delete_disruption_budget, plan_policies
from elasticjob_operator.plan.life_cycle.queueing import admitted_spec, plan_workload
from elasticjob_operator.plan.life_cycle.suspension import is_suspended, remove_children, resumes, stores_left
from elasticjob_operator.plan.pods.capacity import Capacity, plan_capacity, unchanged_capacity
from elasticjob_operator.plan.pods.cordons import with_cordon_spares
from elasticjob_operator.plan.pods.indices import coordinator_settings, with_vacant_indices
from elasticjob_operator.plan.pods.node_warnings import ending_pods
from elasticjob_operator.plan.pods.pod_decisions import PodDecision, decide_pods, still_avoided
from elasticjob_operator.plan.pods.start_attempts import plan_starts, unchanged_starts
from elasticjob_operator.plan.pods.workers import (
    WorkersPlan,
    draining_pods,
    expected_pod_of,
    plan_workers,
    with_topology,
)
from elasticjob_operator.plan.store_pods.standby import usable_standby_store
from elasticjob_operator.plan.store_pods.store_confirmation import confirmed_request
from elasticjob_operator.plan.store_pods.stores import StorePlan, current_store, no_store, plan_store
from elasticjob_operator.plan.training_state import TrainingState, read_training_state

SHORTEST_REQUEUE = 0.05
"""Seconds until the next reconcile at least."""
NAME_TAKEN_REQUEUE = 15.0
"""Seconds between reconciles of a job while an object of another owner has the name of one of its children."""
FIRST_TERMINATING_REQUEUE = 0.2
"""Seconds until the next reconcile while objects of that name are being deleted; it grows with the time waited."""


@dataclass(frozen=True)
class StoreAddress:
    """Where the control link of a job connects to."""

    pod: str
    host: str
    port: int
    run_id: str
    attempt: int
    incarnation: int
    keep_alive: tuple[float, int]
    """Interval in seconds, and the number of attempts."""
    pods: int = field(default=1, compare=False)
    """How many worker pods the job has: bounds what its store may send. A change of it opens no new link."""


@dataclass(frozen=True)
class Plan:
    """What must be done for a job, in this order: write `status`, connect to `store_address`, send `operator_view`,
    execute `actions`, record `event_records`."""

    status: Mapping[str, Any] | None = None
    """None if it equals the last status."""
    write_delay: float = 0.0
    """Seconds by which the status write may be delayed, to be combined with later changes: nothing depends on it."""
    operator_view: OperatorView | None = None
    """Sent to the store once `status` is written; its lease and sequence are not set yet."""
    store_address: StoreAddress | None = None
    """None while no store can serve."""
    standby_view: OperatorView | None = None
    """The same for the standby store, or for one that is retired."""
    standby_address: StoreAddress | None = None
    """None without such a store."""
    actions: tuple[Action, ...] = ()
    withheld: frozenset[str] = frozenset()
    """Names of worker pods that status names and that are created later: once older pods of their index have ended, or
    the job's gang has its Nodes."""
    failed_starts: int = 0
    """What new worker pods carry: how many attempts to start pods have failed."""
    key_id: str = ""
    """Stands for the keys that new pods get, and that the store at `store_address` has (`JobKeys.key_id`)."""
    event_records: tuple[EventRecord, ...] = ()
    unresponsive_store: str = ""
    """The node of a store that this plan replaces because it does not respond; empty if it replaces none."""
    requeue_after: float | None = None
    """Seconds after which the job must be reconciled again even without a watch event; None: no such need."""


def plan(observed: Observed, image: str, now: float) -> Plan:
    """Decide on one job.

    `image` is the operator's own image; a job that is not pinned to an image yet is pinned to it. `now` is Unix
    seconds.
    """
    job = observed.job
    if job.deleting or not job.managed:
        return Plan()
    if job.spec is None or (job.spec_error and _is_new(job, job.spec)):
        return _invalid(job, now)
    inputs = _inputs(observed, job.spec, now)
    training = read_training_state(inputs)
    declared = job_end.declared_outcome(inputs) is not None
    # No pod of a suspended job is missing or to be replaced, and none of a job that can have no successor for it.
    creates_none = is_suspended(inputs) or resumes(inputs) or _names_taken(inputs)
    no_starts = declared or creates_none
    attempts = unchanged_starts(inputs) if no_starts else plan_starts(inputs, new_round=training.is_new_round)
    capacity = _plan_capacity(inputs, training, ended=declared)
    inputs = replace(inputs, withdrawn=capacity.withdrawn)
    # The pods of a job whose end is declared are decided on too: they are kept or deleted.
    pods = () if creates_none and not declared else decide_pods(inputs, attempts.retry_at)
    budget = unchanged_budget(inputs) if declared else plan_budget(inputs, pods, attempts)
    outcome = job_end.evaluate_outcome(inputs, training, budget, attempts)
    store, workers, actions = _children_of(inputs, training, pods, budget, capacity, outcome)
    actions += plan_workload(inputs, training, outcome) + answer_evictions(inputs, pods)
    if outcome is None and (deadline := job_end.deadline_at(inputs)) is not None:
        actions += Actions(requeue_at=(deadline,))
    decisions = Decisions(inputs, pods, workers, store, training, budget, attempts, capacity, outcome)
    return _to_plan(decisions, actions, image, declared=declared)


def _inputs(observed: Observed, spec: JobSpec, now: float) -> ReconcileContext:
    """Return what the decisions depend on: the spec as the queue admits it, with the keys of this execution."""
    keyed = with_key_id(observed)
    inputs = with_cordon_spares(ReconcileContext(keyed, admitted_spec(keyed, spec), now, observed.job.status.vacant))
    if job_end.declared_outcome(inputs) is not None:
        return inputs
    return replace(inputs, vacant=frozenset()) if resumes(inputs) else with_vacant_indices(inputs)


def _children_of(
    inputs: ReconcileContext,
    training: TrainingState,
    pods: tuple[PodDecision, ...],
    budget: Budget,
    capacity: Capacity,
    outcome: job_end.JobOutcome | None,
) -> tuple[StorePlan, WorkersPlan, Actions]:
    """Return which store serves, which worker pods are expected, and what is done to reach that."""
    if outcome is not None:
        return _end(inputs, outcome, declared=training.outcome is not None)
    if is_suspended(inputs):
        return _suspend(inputs)
    if resumes(inputs):
        return _resume(inputs)
    if _names_taken(inputs):
        return _wait_for_names(inputs)
    return _run(inputs, pods, budget, capacity)


def _end(
    inputs: ReconcileContext, outcome: job_end.JobOutcome, *, declared: bool
) -> tuple[StorePlan, WorkersPlan, Actions]:
    """The job has an outcome: its pods end, and later the job itself is deleted."""
    actions = job_end.remove_pods(inputs, outcome, declared=declared) + job_end.expire(inputs)
    return current_store(inputs), _unchanged_workers(inputs), actions + delete_disruption_budget(inputs)


def _suspend(inputs: ReconcileContext) -> tuple[StorePlan, WorkersPlan, Actions]:
    """The job is suspended: its workers stop at one step, then pods and store go."""
    store = current_store(inputs) if stores_left(inputs) else no_store()
    workers = replace(_unchanged_workers(inputs), expected_pods=draining_pods(inputs))
    return store, workers, remove_children(inputs) + delete_disruption_budget(inputs)


def _resume(inputs: ReconcileContext) -> tuple[StorePlan, WorkersPlan, Actions]:
    """The job is resumed: the status begins the next execution, and the next reconcile creates its children."""
    return no_store(), _unchanged_workers(inputs), Actions(requeue_at=(inputs.now,))


def _wait_for_names(inputs: ReconcileContext) -> tuple[StorePlan, WorkersPlan, Actions]:
    """Another owner's object has the name of a child: nothing is created, and what runs goes on."""
    expected = tuple(expected_pod_of(pod) for pod in inputs.observed.workers if pod.end is None)
    workers = replace(_unchanged_workers(inputs), expected_pods=expected)
    return current_store(inputs), workers, Actions(requeue_at=(inputs.now + _name_requeue(inputs),))


def _run(
    inputs: ReconcileContext, pods: tuple[PodDecision, ...], budget: Budget, capacity: Capacity
) -> tuple[StorePlan, WorkersPlan, Actions]:
    """The job trains, or is to: it has a store, and a worker pod for each index."""
    store = plan_store(inputs)
    lost = (store.lost_node,) if store.lost_node else ()
    workers = plan_workers(inputs, pods, (*lost, *budget.avoided))
    return store, workers, _start(inputs, store, workers) + Actions(requeue_at=capacity.requeue_at)


def _to_plan(decisions: Decisions, actions: Actions, image: str, *, declared: bool) -> Plan:
    """Return the plan of these decisions. `declared`: an earlier status has the job's outcome already."""
    inputs, store = decisions.inputs, decisions.store
    current = current_conditions(decisions)
    records = (*decisions.budget.event_records, *actions.event_records, *_records(decisions, current, declared))
    status = next_status(decisions, current, image)
    view, newer = _operator_view(decisions), _newer_store(inputs, store)
    return Plan(
        status=None if same_status(status, inputs.status.raw) else status,
        # Events are about changes since the last status: it is written with them, or they would be recorded again.
        write_delay=0.0 if records else write_delay(status, inputs.status.raw),
        operator_view=view,
        store_address=_address(inputs, store.pod),
        standby_view=None if newer is None else _standby_view(inputs, store, view, newer),
        standby_address=_address(inputs, newer),
        actions=actions.actions,
        withheld=decisions.workers.withheld,
        failed_starts=decisions.start_attempts.failed,
        key_id=inputs.status.key_id,
        event_records=records,
        unresponsive_store=store.lost_node.name if store.lost_node else "",
        requeue_after=max(SHORTEST_REQUEUE, min(actions.requeue_at) - inputs.now) if actions.requeue_at else None,
    )


def _records(decisions: Decisions, current: dict[ConditionType, Condition], declared: bool) -> tuple[EventRecord, ...]:
    if decisions.outcome is None:
        return event_records(decisions, current)
    return job_end.changed_event(decisions.inputs) if declared else (job_end.outcome_event(decisions.outcome),)


def _plan_capacity(ctx: ReconcileContext, training: TrainingState, *, ended: bool) -> Capacity:
    if ended:
        return unchanged_capacity(ctx)
    # A resumed job asks for all of its pods.
    return Capacity() if is_suspended(ctx) or resumes(ctx) else plan_capacity(ctx, training)


def _is_new(job: Job, spec: JobSpec) -> bool:
    """Return whether the job has never started, and is to start now.

    If it started before, its spec was broken while it was suspended, or a newer operator checks more: its pods go on,
    it can be suspended, and only new worker pods cannot be created (`RefusalReason.INVALID_SPEC`) until the spec is
    corrected.
    """
    status = job.status
    started = status.execution_attempts > 0 or status.store_incarnation is not None
    return not (started or spec.suspend or status.is_true(ConditionType.SUSPENDED))


def _invalid(job: Job, now: float) -> Plan:
    """Fail a job that has never started, and whose spec the API server should have refused."""
    if job.status.terminal or job.status.store_incarnation is not None:
        return Plan()
    invalid = conditions.condition(True, "InvalidSpec", job.spec_error)
    written = written_condition(ConditionType.FAILED, invalid, job.generation, now)
    status = {
        "observedGeneration": job.generation,
        "phase": "Failed",
        "completionTime": timestamp(now),
        "conditions": [written],
    }
    return Plan(status=status, event_records=(EventRecord("InvalidSpec", job.spec_error, key="end", warning=True),))


def _names_taken(ctx: ReconcileContext) -> bool:
    """Return whether another owner's Service has the name of a child. The operator then creates nothing, and
    does not touch that object."""
    return bool(ctx.observed.children.not_ours)


def _name_requeue(ctx: ReconcileContext) -> float:
    """Return the seconds until the operator reads the objects again that have the names of children.

    It does not watch them. Kubernetes usually deletes the objects of a deleted job within a second.
    """
    since = ctx.observed.terminating_since
    if since is None or not all(child.terminating for child in ctx.observed.children.not_ours):
        return NAME_TAKEN_REQUEUE
    return min(NAME_TAKEN_REQUEUE, max(FIRST_TERMINATING_REQUEUE, (ctx.now - since) / 2))


def _unchanged_workers(ctx: ReconcileContext) -> WorkersPlan:
    return WorkersPlan(ctx.status.incarnations, still_avoided(ctx), ctx.status.suspects, (), Actions())


def _start(ctx: ReconcileContext, store: StorePlan, workers: WorkersPlan) -> Actions:
    # The Services and the Secret come first: the pods need them.
    children = Actions(actions=plan_children(ctx, store))
    return children + store.actions + workers.actions + plan_policies(ctx) + Actions(requeue_at=_retries(ctx))


def _retries(ctx: ReconcileContext) -> tuple[float, ...]:
    return tuple(r.retry_at for r in ctx.observed.refusals.values() if r.retry_at > ctx.now)


# ---- the store -------------------------------------------------------------------------------------------------


def _operator_view(decisions: Decisions) -> OperatorView:
    stages = finished_stages(decisions) or {}
    return OperatorView(
        lease=0,
        sequence=0,
        settings=coordinator_settings(decisions.inputs),
        charged=decisions.budget.counted,
        charged_since=decisions.budget.counted_since if decisions.inputs.spec.restart_window else 0.0,
        charged_round=decisions.budget.charged_round,
        charged_rounds=charged_rounds(decisions.budget),
        pods=with_topology(decisions.inputs, decisions.workers.expected_pods),
        confirmed_request=0.0 if decisions.store.promoted else confirmed_request(decisions.inputs),
        confirmed_half=_half_missing(decisions),
        finish=_finish(decisions.outcome) if decisions.outcome else None,
        serving=-1 if decisions.store.incarnation is None else decisions.store.incarnation,
        standby_store=None
        if decisions.store.promoted
        else usable_standby_store(decisions.inputs, decisions.store.standby),
        newest_round=decisions.training.last_round,
        ending_pods=ending_pods(decisions.inputs),
        finished_stages=stages.get("finished", 0),
        launchers=tuple(stages.get("launchers", ())),
    )


def _half_missing(decisions: Decisions) -> bool:
    report = decisions.inputs.report
    return not decisions.store.promoted and report is not None and report.half_missing_round is not None


def _newer_store(ctx: ReconcileContext, store: StorePlan) -> Pod | None:
    """Return the pod of the standby store, or of a retired one that must confirm it; None if it serves already."""
    return None if ctx.newer_store is None or store.promoted else ctx.newer_store


def _standby_view(ctx: ReconcileContext, store: StorePlan, view: OperatorView, newer: Pod) -> OperatorView:
    """Return the view for a passive store: it knows the job as the serving store does."""
    serving = ctx.store_pod(store.incarnation)
    same_node = [p.name for p in ctx.observed.workers if serving is not None and p.node and p.node == serving.node]
    return replace(
        view,
        confirmed_request=0.0,
        confirmed_half=False,
        standby_store=None,
        retired=newer.incarnation != store.standby,
        beside_store=tuple(sorted(same_node)),
    )


def _finish(outcome: job_end.JobOutcome) -> Finish:
    """Return the job's end for a store that did not declare it or restarted since: no connected agent may run again."""
    declared = Outcome.SUCCEEDED if outcome.succeeded else Outcome.FAILED
    return Finish(declared, outcome.reason, outcome.message[:1024])


def _address(ctx: ReconcileContext, pod: Pod | None) -> StoreAddress | None:
    if pod is None:
        return None
    return StoreAddress(
        pod=pod.name,
        host=pod.ip,
        port=ctx.spec.port,
        run_id=ctx.job.uid,
        attempt=attempt(ctx.job),
        incarnation=pod.incarnation,
        keep_alive=(float(ctx.spec.keep_alive_interval), ctx.spec.keep_alive_attempts),
        pods=len(ctx.observed.workers),
    )
