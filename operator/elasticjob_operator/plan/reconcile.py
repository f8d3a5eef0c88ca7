"""The parts of a plan put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob.contract.messages import Finish, Outcome
from elasticjob.contract.messages import OperatorView as LinkFacts
from elasticjob_operator.actions import (
    Action,
    CreateNodesService,
    CreateSecret,
    CreateStoreService,
    EventRecord,
    UpdateStoreService,
)
from elasticjob_operator.model.observed import Job, Observed
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.model.status import Condition, ConditionType
from elasticjob_operator.plan import job_end, world
from elasticjob_operator.plan.budget import Budget, plan_budget
from elasticjob_operator.plan.conditions import JobContext
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.event_records import event_records
from elasticjob_operator.plan.pod_decisions import decide_pods, still_avoided
from elasticjob_operator.plan.status import current_conditions, is_minor_change, next_status, same_status
from elasticjob_operator.plan.stores import StorePlan, confirmed_request, plan_store
from elasticjob_operator.plan.workers import WorkersPlan, plan_workers

SHORTEST_WAIT = 0.05
NAME_WAIT = 15.0
"""Seconds between looks at a name that somebody else has."""


@dataclass(frozen=True)
class StoreAddress:
    """Where the control link of a job goes."""

    pod: str
    host: str
    port: int
    run_id: str
    attempt: int
    incarnation: int
    keep_alive: tuple[float, int]
    """Interval in seconds, attempts."""


@dataclass(frozen=True)
class Plan:
    """`status` is None when it says the same as the one read. The order of use: status, facts, actions, notes."""

    status: Mapping[str, Any] | None = None
    minor: bool = False
    """Whether nothing depends on the write and nobody waits for it: more of the like may be awaited first."""
    operator_view: LinkFacts | None = None
    """For the store, without lease and sequence; only to be sent once `status` is written."""
    store_address: StoreAddress | None = None
    actions: tuple[Action, ...] = ()
    event_records: tuple[EventRecord, ...] = ()
    requeue_after: float | None = None
    """Seconds after which to look again even if nothing is heard."""


def plan(observed: Observed, image: str, now: float) -> Plan:
    """Decide for one job. `image` is the operator's own, used by jobs that have none pinned; `now` is Unix seconds."""
    job = observed.job
    if job.deleting:
        return Plan()
    if job.spec is None:
        return _invalid(job, now)
    ctx = ReconcileContext(observed, job.spec, now)
    decisions = decide_pods(ctx)
    told_before = job_end.declared_outcome(ctx)
    budget = _frozen(ctx) if told_before else plan_budget(ctx, decisions)
    seen = world.read_world(ctx)
    verdict = job_end.evaluate_outcome(ctx, seen, budget)
    if verdict is not None:
        store, workers = _last_store(ctx), _no_more_workers(ctx)
        todo = job_end.remove_pods(ctx, verdict, told=seen.outcome is not None)
    elif _names_taken(ctx):
        store, workers = _last_store(ctx), _no_more_workers(ctx)
        todo = Actions(requeue_at=(ctx.now + NAME_WAIT,))
    else:
        store = plan_store(ctx)
        workers = plan_workers(ctx, decisions, store.lost_node)
        todo = _start(ctx, store, workers)
    facts = JobContext(ctx, decisions, workers, store, seen, budget, verdict)
    told = current_conditions(facts)
    told_notes = (*budget.event_records, *todo.event_records)
    if verdict is None:
        told_notes += event_records(facts, told)
    elif told_before is None:
        told_notes += (job_end.outcome_event(verdict),)
    status = next_status(facts, told, image)
    return Plan(
        status=None if same_status(status, ctx.status.raw) else status,
        minor=not todo.actions and is_minor_change(status, ctx.status.raw),
        operator_view=_link_facts(facts),
        store_address=_address(ctx, store),
        actions=todo.actions,
        event_records=told_notes,
        requeue_after=max(SHORTEST_WAIT, min(todo.requeue_at) - now) if todo.requeue_at else None,
    )


def _names_taken(ctx: ReconcileContext) -> bool:
    """Somebody else's Service or Secret has the name: make nothing, and touch nothing of theirs."""
    children = ctx.observed.children
    named = (children.secret, children.nodes, children.rendezvous)
    return any(child is not None and not child.ours for child in named)


def _start(ctx: ReconcileContext, store: StorePlan, workers: WorkersPlan) -> Actions:
    """Services and Secret before the pods that need them."""
    return Actions(actions=_children(ctx, store)) + store.actions + workers.actions + Actions(requeue_at=_retries(ctx))


def _children(ctx: ReconcileContext, store: StorePlan) -> tuple[Action, ...]:
    name, children = ctx.job.name, ctx.observed.children
    actions: list[Action] = []
    if children.secret is None and _may(ctx, f"Secret/{name}-rdzv"):
        actions.append(CreateSecret())
    if children.nodes is None and _may(ctx, f"Service/{name}"):
        actions.append(CreateNodesService())
    rendezvous = children.rendezvous
    if rendezvous is None and _may(ctx, f"Service/{name}-rdzv"):
        actions.append(CreateStoreService(store.incarnation or 0))
    elif (
        rendezvous is not None
        and store.incarnation is not None
        and rendezvous.ours
        and rendezvous.incarnation != store.incarnation
    ):
        actions.append(UpdateStoreService(rendezvous.uid, store.incarnation))
    return tuple(actions)


def _may(ctx: ReconcileContext, child: str) -> bool:
    refusal = ctx.observed.refusals.get(child)
    return refusal is None or ctx.now >= refusal.retry_at


def _retries(ctx: ReconcileContext) -> tuple[float, ...]:
    return tuple(r.retry_at for r in ctx.observed.refusals.values() if r.retry_at > ctx.now)


# ---- the end ---------------------------------------------------------------------------------------------------


def _frozen(ctx: ReconcileContext) -> Budget:
    status = ctx.status
    return Budget(status.restarts, status.restarts_counted, status.charged_round)


def _last_store(ctx: ReconcileContext) -> StorePlan:
    """The store as it is, with no successor."""
    incarnation = ctx.status.store_incarnation
    pod = next((p for p in ctx.observed.stores if p.incarnation == incarnation and p.running and p.ip), None)
    return StorePlan(incarnation, pod, Actions())


def _no_more_workers(ctx: ReconcileContext) -> WorkersPlan:
    return WorkersPlan(ctx.status.incarnations, still_avoided(ctx), (), Actions())


# ---- the store -------------------------------------------------------------------------------------------------


def _link_facts(f: JobContext) -> LinkFacts:
    return LinkFacts(
        lease=0,
        sequence=0,
        settings=f.ctx.spec.settings,
        charged=f.budget.counted,
        charged_round=f.budget.charged_round,
        pods=f.workers.expected_pods,
        confirmed_request=confirmed_request(f.ctx),
        finish=_finish(f.outcome) if f.outcome else None,
    )


def _finish(verdict: job_end.JobOutcome) -> Finish:
    """For a coordinator that did not declare the job's end, or died since: nobody who is still here may run again."""
    outcome = Outcome.SUCCEEDED if verdict.succeeded else Outcome.FAILED
    return Finish(outcome, verdict.reason, verdict.message[:1024])


def _address(ctx: ReconcileContext, store: StorePlan) -> StoreAddress | None:
    if store.pod is None or store.incarnation is None:
        return None
    spec = ctx.spec
    return StoreAddress(
        pod=store.pod.name,
        host=store.pod.ip,
        port=spec.port,
        run_id=ctx.job.uid,
        attempt=max(1, ctx.status.execution_attempts),
        incarnation=store.incarnation,
        keep_alive=(float(spec.keep_alive_interval), spec.keep_alive_attempts),
    )


def _invalid(job: Job, now: float) -> Plan:
    """A spec that the API server should have refused. A job that already runs is left as it is."""
    if job.status.terminal or job.status.store_incarnation is not None:
        return Plan()
    failed = Condition("True", "InvalidSpec", job.spec_error, now)
    written = {
        "type": ConditionType.FAILED.value,
        "status": failed.status,
        "reason": failed.reason,
        "message": failed.message,
        "observedGeneration": job.generation,
        "lastTransitionTime": timestamp(now),
    }
    status = {"observedGeneration": job.generation, "phase": "Failed", "conditions": [written]}
    return Plan(status=status, event_records=(EventRecord("InvalidSpec", job.spec_error, key="end", warning=True),))
