"""The parts of a plan put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob.contract.messages import Facts as LinkFacts
from elasticjob.contract.messages import Finish, Outcome
from elasticjob_operator.actions import (
    Action,
    CreateNodesService,
    CreateSecret,
    CreateStoreService,
    Note,
    PointStoreService,
)
from elasticjob_operator.model.observed import Job, Observed
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.model.status import Condition, ConditionType
from elasticjob_operator.plan import job_end, world
from elasticjob_operator.plan.budget import Budget, plan_budget
from elasticjob_operator.plan.conditions import Facts
from elasticjob_operator.plan.context import Context, Todo
from elasticjob_operator.plan.event_records import notes
from elasticjob_operator.plan.pod_decisions import judge_slots, still_avoided
from elasticjob_operator.plan.status import minor, next_status, same, told_conditions
from elasticjob_operator.plan.stores import Store, plan_store, word
from elasticjob_operator.plan.workers import Workers, plan_workers

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
    facts: LinkFacts | None = None
    """For the store, without lease and sequence; only to be sent once `status` is written."""
    store: StoreAddress | None = None
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    requeue_after: float | None = None
    """Seconds after which to look again even if nothing is heard."""


def plan(observed: Observed, image: str, now: float) -> Plan:
    """Decide for one job. `image` is the operator's own, used by jobs that have none pinned; `now` is Unix seconds."""
    job = observed.job
    if job.deleting:
        return Plan()
    if job.spec is None:
        return _invalid(job, now)
    ctx = Context(observed, job.spec, now)
    slots = judge_slots(ctx)
    told_before = job_end.given_before(ctx)
    budget = _frozen(ctx) if told_before else plan_budget(ctx, slots)
    seen = world.look(ctx)
    verdict = job_end.judge(ctx, seen, budget)
    if verdict is not None:
        store, workers = _last_store(ctx), _no_more_workers(ctx)
        todo = job_end.clean(ctx, verdict, told=seen.outcome is not None)
    elif _names_taken(ctx):
        store, workers = _last_store(ctx), _no_more_workers(ctx)
        todo = Todo(wake=(ctx.now + NAME_WAIT,))
    else:
        store = plan_store(ctx)
        workers = plan_workers(ctx, slots, store.lost_node)
        todo = _start(ctx, store, workers)
    facts = Facts(ctx, slots, workers, store, seen, budget, verdict)
    told = told_conditions(facts)
    told_notes = (*budget.notes, *todo.notes)
    if verdict is None:
        told_notes += notes(facts, told)
    elif told_before is None:
        told_notes += (job_end.note(verdict),)
    status = next_status(facts, told, image)
    return Plan(
        status=None if same(status, ctx.status.raw) else status,
        minor=not todo.actions and minor(status, ctx.status.raw),
        facts=_link_facts(facts),
        store=_address(ctx, store),
        actions=todo.actions,
        notes=told_notes,
        requeue_after=max(SHORTEST_WAIT, min(todo.wake) - now) if todo.wake else None,
    )


def _names_taken(ctx: Context) -> bool:
    """Somebody else's Service or Secret has the name: make nothing, and touch nothing of theirs."""
    children = ctx.observed.children
    named = (children.secret, children.nodes, children.rendezvous)
    return any(child is not None and not child.ours for child in named)


def _start(ctx: Context, store: Store, workers: Workers) -> Todo:
    """Services and Secret before the pods that need them."""
    return Todo(actions=_children(ctx, store)) + store.todo + workers.todo + Todo(wake=_retries(ctx))


def _children(ctx: Context, store: Store) -> tuple[Action, ...]:
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
        actions.append(PointStoreService(rendezvous.uid, store.incarnation))
    return tuple(actions)


def _may(ctx: Context, child: str) -> bool:
    refusal = ctx.observed.refusals.get(child)
    return refusal is None or ctx.now >= refusal.retry_at


def _retries(ctx: Context) -> tuple[float, ...]:
    return tuple(r.retry_at for r in ctx.observed.refusals.values() if r.retry_at > ctx.now)


# ---- the end ---------------------------------------------------------------------------------------------------


def _frozen(ctx: Context) -> Budget:
    status = ctx.status
    return Budget(status.restarts, status.restarts_counted, status.charged_round)


def _last_store(ctx: Context) -> Store:
    """The store as it is, with no successor."""
    incarnation = ctx.status.store_incarnation
    pod = next((p for p in ctx.observed.stores if p.incarnation == incarnation and p.running and p.ip), None)
    return Store(incarnation, pod, Todo())


def _no_more_workers(ctx: Context) -> Workers:
    return Workers(ctx.status.incarnations, still_avoided(ctx), (), Todo())


# ---- the store -------------------------------------------------------------------------------------------------


def _link_facts(f: Facts) -> LinkFacts:
    return LinkFacts(
        lease=0,
        sequence=0,
        settings=f.ctx.spec.settings,
        charged=f.budget.counted,
        charged_round=f.budget.charged_round,
        pods=f.workers.facts,
        only_store=word(f.ctx),
        finish=_finish(f.verdict) if f.verdict else None,
    )


def _finish(verdict: job_end.Verdict) -> Finish:
    """For a coordinator that did not declare the job's end, or died since: nobody who is still here may run again."""
    outcome = Outcome.SUCCEEDED if verdict.succeeded else Outcome.FAILED
    return Finish(outcome, verdict.reason, verdict.message[:1024])


def _address(ctx: Context, store: Store) -> StoreAddress | None:
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
    return Plan(status=status, notes=(Note("InvalidSpec", job.spec_error, key="end", warning=True),))
