"""What the warnings of nodes, and Evictions of pods, mean for a job. `pod_decisions`, `stores` and `standby` move its
pods."""

from __future__ import annotations

from elasticjob._runtime.contract.messages import EndingPod
from elasticjob_operator.model.cluster.evictions import Eviction
from elasticjob_operator.plan.context import ReconcileContext

EVICTION_REQUESTED = "EvictionRequested"
"""Reason of a pod that has left because an Eviction asked for it, and of the Event about it."""


def describe_leaving(ctx: ReconcileContext) -> str:
    """Return which worker pods must leave a node because its end is announced; empty if none must."""
    there = [p for p in ctx.observed.workers if p.end is None and p.node in ctx.nodes_to_leave]
    leaving = [p for p in there if p.node not in p.avoided_nodes]
    if not leaving:
        return ""
    first, more = leaving[0], f" and {len(leaving) - 1} more" if len(leaving) > 1 else ""
    verb = "must leave" if first.node in ctx.notices else "is to leave"
    return f"{first.name}{more} {verb}: {first.node} has the {ctx.nodes_to_leave[first.node]}"


def pods_to_drain(ctx: ReconcileContext) -> frozenset[str]:
    """Return the names of the pods that may leave now, of those on Nodes to be drained and those that an Eviction asks
    to leave.

    Pods that can train leave only while `minReplicas` others remain, the highest index first (no bound if
    `spec.disruptionBudget` is false). A pod that cannot train yet leaves at once. One that is Ready, but not in the
    store's report, waits for a report. Pods that must leave (`ctx.must_leave`) leave anyway, and do not count as
    remaining.

    If the job has no PodDisruptionBudget now, evicted pods leave at once too: otherwise the Eviction API, the next
    responder, would evict them in any case.
    """
    on_drained_nodes = [pod for pod in ctx.current_pods if pod.node in ctx.drains and ctx.should_leave(pod)]
    evicted = [pod for pod in ctx.current_pods if pod.live and pod.uid in ctx.evictions]
    pods = [pod for pod in ctx.current_pods if pod in on_drained_nodes or pod in evicted]
    policies = ctx.observed.policies
    unbounded = evicted if policies.known and policies.budget is None else []
    ready = [pod for pod in ctx.current_pods if pod.live and pod.name in ctx.ready_pods and not ctx.must_leave(pod)]
    cannot_train = [pod for pod in pods if pod.name not in ctx.ready_pods and not pod.ready]
    can_train = sorted((pod for pod in pods if pod in ready), key=lambda pod: -pod.index)
    allowed = max(0, len(ready) - ctx.spec.min_replicas) if ctx.spec.disruption_budget else len(can_train)
    return frozenset(pod.name for pod in (*cannot_train, *unbounded, *can_train[:allowed]))


def describe_request_to_leave(eviction: Eviction) -> str:
    """Return that an Eviction asks its pod to leave, and on whose behalf."""
    of = f" of {', '.join(eviction.requesters[:3])}" if eviction.requesters else ""
    return f"Eviction {eviction.name}{of} asks {eviction.pod} to leave"


def ending_pods(ctx: ReconcileContext) -> tuple[EndingPod, ...] | None:
    """Return the live worker pods on nodes that are known to end at a certain time; None while Nodes are not watched.

    Also those that stay there because they were placed there nevertheless: they end with the Node.
    """
    if not ctx.observed.nodes_watched:
        return None
    ends = {name: warning.ends_at for name, warning in ctx.observed.warnings.items()}
    pods = sorted((p for p in ctx.observed.workers if p.end is None), key=lambda p: (p.index, p.incarnation))
    return tuple(EndingPod(p.name, end) for p in pods if (end := ends.get(p.node)) is not None)
