"""Decide on one job: combine the decisions of the other modules into a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob._runtime.contract.messages import Finish, OperatorView, Outcome
from elasticjob_operator.actions import (
    Action,
    CreateGang,
    CreateNodesService,
    CreateSecret,
    CreateStoreService,
    EventRecord,
    ReplaceGang,
    ResizeGang,
    UpdateStoreService,
)
from elasticjob_operator.manifests import gang_child
from elasticjob_operator.manifests.gang import IMMUTABLE
from elasticjob_operator.manifests.names import attempt, key_secret, nodes_service, store_service
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.model.observed import Job, Observed
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.failure_policy.budget import charged_rounds, plan_budget, unchanged_budget
from elasticjob_operator.plan.job_status import conditions
from elasticjob_operator.plan.job_status.conditions import JobContext
from elasticjob_operator.plan.job_status.event_records import event_records
from elasticjob_operator.plan.job_status.next_status import (
    current_conditions,
    next_status,
    same_status,
    write_delay,
    written_condition,
)
from elasticjob_operator.plan.life_cycle import job_end
from elasticjob_operator.plan.life_cycle.key_ids import with_key_id
from elasticjob_operator.plan.life_cycle.policies import delete_disruption_budget, plan_policies
from elasticjob_operator.plan.life_cycle.queueing import admitted_spec, plan_workload
from elasticjob_operator.plan.life_cycle.suspension import is_suspended, remove_children, resumes, stores_left
from elasticjob_operator.plan.pods.capacity import Capacity, plan_capacity, unchanged_capacity
from elasticjob_operator.plan.pods.cordons import with_cordon_spares
from elasticjob_operator.plan.pods.indices import coordinator_settings, with_vacant_indices
from elasticjob_operator.plan.pods.node_warnings import ending_pods
from elasticjob_operator.plan.pods.pod_decisions import decide_pods, still_avoided
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
from elasticjob_operator.plan.training_state import World, read_world

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
    """Names of worker pods that status names and that are created later, once older pods of their index have ended."""
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
    keyed = with_key_id(observed)
    ctx = with_cordon_spares(ReconcileContext(keyed, admitted_spec(keyed, job.spec), now, job.status.vacant))
    already_declared = job_end.declared_outcome(ctx) is not None
    if not already_declared:
        ctx = replace(ctx, vacant=frozenset()) if resumes(ctx) else with_vacant_indices(ctx)
    world = read_world(ctx)
    idle = already_declared or is_suspended(ctx) or resumes(ctx) or _names_taken(ctx)
    starts = unchanged_starts(ctx) if idle else plan_starts(ctx, new_round=world.is_new_round)
    capacity = _plan_capacity(ctx, world, ended=already_declared)
    ctx = replace(ctx, withdrawn=capacity.withdrawn)
    # No pod of a suspended job is missing or to be replaced, and none of a job that can have no successor for it.
    decisions = () if idle and not already_declared else decide_pods(ctx, starts.retry_at)
    budget = unchanged_budget(ctx) if already_declared else plan_budget(ctx, decisions, starts)
    outcome = job_end.evaluate_outcome(ctx, world, budget, starts)
    if outcome is not None:
        store, workers = current_store(ctx), _unchanged_workers(ctx)
        actions = job_end.remove_pods(ctx, outcome, declared=world.outcome is not None) + job_end.expire(ctx)
        actions += delete_disruption_budget(ctx)
    elif is_suspended(ctx):
        store = current_store(ctx) if stores_left(ctx) else no_store()
        workers = replace(_unchanged_workers(ctx), expected_pods=draining_pods(ctx))
        actions = remove_children(ctx) + delete_disruption_budget(ctx)
    elif resumes(ctx):
        store, workers = no_store(), _unchanged_workers(ctx)
        actions = Actions(requeue_at=(now,))
    elif _names_taken(ctx):
        expected = tuple(expected_pod_of(pod) for pod in ctx.observed.workers if pod.end is None)
        store, workers = current_store(ctx), replace(_unchanged_workers(ctx), expected_pods=expected)
        actions = Actions(requeue_at=(now + _name_requeue(ctx),))
    else:
        store = plan_store(ctx)
        lost = (store.lost_node,) if store.lost_node else ()
        workers = plan_workers(ctx, decisions, (*lost, *budget.avoided))
        actions = _start(ctx, store, workers) + Actions(requeue_at=capacity.requeue_at)
    actions += plan_workload(ctx, world, outcome)
    if outcome is None and (deadline := job_end.deadline_at(ctx)) is not None:
        actions += Actions(requeue_at=(deadline,))
    context = JobContext(ctx, decisions, workers, store, world, budget, starts, capacity, outcome)
    current = current_conditions(context)
    records = (*budget.event_records, *actions.event_records)
    if outcome is None:
        records += event_records(context, current)
    elif already_declared:
        records += job_end.changed_event(ctx)
    else:
        records += (job_end.outcome_event(outcome),)
    status = next_status(context, current, image)
    view, newer = _operator_view(context), _newer_store(ctx, store)
    return Plan(
        status=None if same_status(status, ctx.status.raw) else status,
        # Events are about changes since the last status: it is written with them, or they would be recorded again.
        write_delay=0.0 if records else write_delay(status, ctx.status.raw),
        operator_view=view,
        store_address=_address(ctx, store.pod),
        standby_view=None if newer is None else _standby_view(ctx, store, view, newer),
        standby_address=_address(ctx, newer),
        actions=actions.actions,
        withheld=workers.withheld,
        failed_starts=starts.failed,
        key_id=ctx.status.key_id,
        event_records=records,
        unresponsive_store=store.lost_node.name if store.lost_node else "",
        requeue_after=max(SHORTEST_REQUEUE, min(actions.requeue_at) - now) if actions.requeue_at else None,
    )


def _plan_capacity(ctx: ReconcileContext, world: World, *, ended: bool) -> Capacity:
    if ended:
        return unchanged_capacity(ctx)
    # A resumed job asks for all of its pods.
    return Capacity() if is_suspended(ctx) or resumes(ctx) else plan_capacity(ctx, world)


def _is_new(job: Job, spec: JobSpec) -> bool:
    """Return whether the job has never started, and is to start now.

    The mistake of any other one came with a suspension, or with an operator that checks more: its pods go on, it can be
    suspended, and only new worker pods cannot be created (`RefusalReason.INVALID_SPEC`) until the spec is corrected.
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
    children = Actions(actions=_children(ctx, store))
    return children + store.actions + workers.actions + plan_policies(ctx) + Actions(requeue_at=_retries(ctx))


def _children(ctx: ReconcileContext, store: StorePlan) -> tuple[Action, ...]:
    name, children = ctx.job.name, ctx.observed.children
    if not children.known:
        return ()
    actions: list[Action] = []
    secret = key_secret(ctx.job)
    if children.secret != secret and ctx.may_create(f"Secret/{secret}"):
        actions.append(CreateSecret())
    if children.nodes is None and ctx.may_create(f"Service/{nodes_service(name)}"):
        actions.append(CreateNodesService())
    rendezvous = children.rendezvous
    if rendezvous is None and ctx.may_create(f"Service/{store_service(name)}"):
        actions.append(CreateStoreService(store.incarnation or 0))
    elif (
        rendezvous is not None
        and store.incarnation is not None
        and rendezvous.ours
        and rendezvous.incarnation != store.incarnation
    ):
        actions.append(UpdateStoreService(rendezvous.uid, store.incarnation))
    return (*actions, *_gang(ctx))


def _gang(ctx: ReconcileContext) -> tuple[Action, ...]:
    gang, child = ctx.observed.children.gang, gang_child(ctx.job, ctx.spec)
    if gang is None:
        return (CreateGang(),) if child and ctx.may_create(child) else ()
    if gang.ours and gang.gang_size != ctx.spec.min_replicas:
        replaced = ctx.spec.gang in IMMUTABLE
        return (ReplaceGang(gang.uid) if replaced else ResizeGang(gang.uid, ctx.spec.min_replicas),)
    return ()


def _retries(ctx: ReconcileContext) -> tuple[float, ...]:
    return tuple(r.retry_at for r in ctx.observed.refusals.values() if r.retry_at > ctx.now)


# ---- the store -------------------------------------------------------------------------------------------------


def _operator_view(context: JobContext) -> OperatorView:
    return OperatorView(
        lease=0,
        sequence=0,
        settings=coordinator_settings(context.ctx),
        charged=context.budget.counted,
        charged_since=context.budget.counted_since if context.ctx.spec.restart_window else 0.0,
        charged_round=context.budget.charged_round,
        charged_rounds=charged_rounds(context.budget),
        pods=with_topology(context.ctx, context.workers.expected_pods),
        confirmed_request=0.0 if context.store.promoted else confirmed_request(context.ctx),
        confirmed_half=_half_missing(context),
        finish=_finish(context.outcome) if context.outcome else None,
        serving=-1 if context.store.incarnation is None else context.store.incarnation,
        standby_store=None if context.store.promoted else usable_standby_store(context.ctx, context.store.standby),
        newest_round=context.world.last_round,
        ending_pods=ending_pods(context.ctx),
    )


def _half_missing(context: JobContext) -> bool:
    report = context.ctx.report
    return not context.store.promoted and report is not None and report.half_missing_round is not None


def _newer_store(ctx: ReconcileContext, store: StorePlan) -> Pod | None:
    """Return the pod of the standby store, or of a retired one that must confirm it; None if it serves already."""
    return None if ctx.newer_store is None or store.promoted else ctx.newer_store


def _standby_view(ctx: ReconcileContext, store: StorePlan, view: OperatorView, newer: Pod) -> OperatorView:
    """Return the view for a passive store: it knows the job as the serving store does."""
    serving = ctx.store_pod(store.incarnation)
    beside = [p.name for p in ctx.observed.workers if serving is not None and p.node and p.node == serving.node]
    return replace(
        view,
        confirmed_request=0.0,
        confirmed_half=False,
        standby_store=None,
        retired=newer.incarnation != store.standby,
        beside_store=tuple(sorted(beside)),
    )


def _finish(outcome: job_end.JobOutcome) -> Finish:
    """Return the job's end for a store that did not declare it or restarted since: no connected node may run again."""
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
