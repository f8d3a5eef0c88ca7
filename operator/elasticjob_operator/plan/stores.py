"""The store pod: exactly one at a time. A successor comes only after the old one has surely ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticjob_operator.actions import CreateStore, DeletePod, Note
from elasticjob_operator.manifests.names import store_pod
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.status import AvoidedNode
from elasticjob_operator.plan.context import LEASE_LATE, STORE_WORD, Context, Todo
from elasticjob_operator.plan.slots import avoided_names


@dataclass(frozen=True)
class Store:
    incarnation: int | None
    """None: the job never had one."""
    pod: Pod | None
    """The pod of this incarnation that control links go to; None while there is none that could serve."""
    todo: Todo
    lost_node: AvoidedNode | None = None
    """The node that was lost with it."""
    lost: str = ""
    """Why the last one is no more, in the plan that names its successor."""


def plan_store(ctx: Context) -> Store:
    """Which incarnation should serve, and what to do for it.

    A pod that is being deleted is waited for: the kubelet takes it from the API only once its container has ended.
    A store that nobody hears of for 10 s, on a node whose kubelet is silent as well, is given up: its object is
    deleted by force. Nodes that could still reach it are cut off like itself, and obey the higher incarnation.
    """
    current = ctx.status.store_incarnation
    if current is None:
        return _create(ctx, 0)
    pod = next((p for p in ctx.observed.stores if p.incarnation == current), None)
    older = [p for p in ctx.observed.stores if p.incarnation < current and p.deleting is None]
    going = Todo(tuple(DeletePod(p.name, p.uid, "a newer store serves") for p in older))
    if pod is None:
        store = _absent(ctx, current)
    elif pod.end is not None:
        going += Todo((DeletePod(pod.name, pod.uid, "it has ended"),))
        store = _create(ctx, current + 1, f"{pod.name} ended: {pod.end.reason} {pod.end.message}".strip())
    else:
        store = _present(ctx, current, pod)
    return replace(store, todo=going + store.todo)


def _absent(ctx: Context, current: int) -> Store:
    name = store_pod(ctx.job.name, current)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None:
        return _create(ctx, current + 1, f"{name} is gone")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return _create(ctx, current + 1)
    if ctx.now < refusal.retry_at:
        return Store(current, None, Todo(wake=(refusal.retry_at,)))
    return _create(ctx, current)


def _present(ctx: Context, current: int, pod: Pod) -> Store:
    silent = 0.0 if ctx.observed.link.connected else ctx.now - ctx.observed.link.since
    age = ctx.lease_age(pod.node) if pod.node else None
    suspect = age is not None and silent >= STORE_WORD and age >= LEASE_LATE
    gone = pod.deleting is not None and ctx.kubelet_gone(pod.node)
    if suspect or gone:
        # Its successor is made once the object is gone: the next plan finds it absent.
        why = f"neither {pod.name} nor the kubelet of {pod.node} is heard of"
        lost = AvoidedNode(pod.node, math.ceil(ctx.now), why)
        return Store(current, None, Todo((DeletePod(pod.name, pod.uid, why, force=True),)), lost)
    if pod.unschedulable and pod.avoids - avoided_names(ctx) and pod.deleting is None:
        why = f"it no longer needs to avoid {', '.join(sorted(pod.avoids))}"
        return Store(current, None, Todo((DeletePod(pod.name, pod.uid, why),)))
    watch = not ctx.observed.link.connected or pod.deleting is not None
    serving = pod if pod.running and pod.ip else None
    return Store(current, serving, Todo(wake=(ctx.now + 5.0,) if watch else ()))


def _create(ctx: Context, incarnation: int, lost: str = "") -> Store:
    name = store_pod(ctx.job.name, incarnation)
    notes = [Note("RendezvousStoreCreated", f"store {name} created", key=name)]
    if lost:
        notes.insert(0, Note("StoreLost", f"{lost}; {name} takes its place", key=name, warning=True))
    away = tuple(sorted(avoided_names(ctx)))
    return Store(incarnation, None, Todo((CreateStore(name, incarnation, away),), tuple(notes)), lost=lost)
