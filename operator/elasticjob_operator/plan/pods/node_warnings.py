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
    there = [p for p in ctx.observed.workers if p.end is None and p.node in ctx.left_nodes]
    leaving = [p for p in there if p.node not in p.avoided_nodes]
    if not leaving:
        return ""
    first, more = leaving[0], f" and {len(leaving) - 1} more" if len(leaving) > 1 else ""
    verb = "must leave" if first.node in ctx.notices else "is to leave"
    return f"{first.name}{more} {verb}: {first.node} has the {ctx.left_nodes[first.node]}"


def pods_to_drain(ctx: ReconcileContext) -> frozenset[str]:
    """Return the names of the pods that leave nodes from which a drain is asked for, or that an Eviction asks to leave,
    as far as the budget allows it.

    As for an eviction, `minReplicas` pods that are ready to train must be left. A pod that cannot train yet is not
    waited for. A job without a budget has no such bound. For an Eviction the budget is the present one, because its
    next responder would evict the pod of a job that has none for now.
    """
    drained = [pod for pod in ctx.current_pods if pod.node in ctx.drains and ctx.should_leave(pod)]
    asked = [pod for pod in ctx.current_pods if pod.live and pod.uid in ctx.evictions]
    pods = [pod for pod in ctx.current_pods if pod in drained or pod in asked]
    policies = ctx.observed.policies
    unbounded = asked if policies.known and policies.budget is None else []
    ready = [pod for pod in ctx.current_pods if pod.live and pod.name in ctx.ready_pods and not ctx.must_leave(pod)]
    idle = [pod for pod in pods if pod.name not in ctx.ready_pods and not pod.ready]
    leaving = sorted((pod for pod in pods if pod in ready), key=lambda pod: -pod.index)
    allowed = max(0, len(ready) - ctx.spec.min_replicas) if ctx.spec.disruption_budget else len(leaving)
    return frozenset(pod.name for pod in (*idle, *unbounded, *leaving[:allowed]))


def describe_request_to_leave(eviction: Eviction) -> str:
    """Return that an Eviction asks its pod to leave, and on whose behalf."""
    of = f" of {', '.join(eviction.requesters[:3])}" if eviction.requesters else ""
    return f"Eviction {eviction.name}{of} asks {eviction.pod} to leave"


def ending_pods(ctx: ReconcileContext) -> tuple[EndingPod, ...] | None:
    """Return the live worker pods on nodes that are known to end at a certain time; None while Nodes are not watched.

    Also those that stay there because they were placed there all the same: they end with the Node.
    """
    if not ctx.observed.nodes_watched:
        return None
    ends = {name: warning.ends_at for name, warning in ctx.observed.warnings.items()}
    pods = sorted((p for p in ctx.observed.workers if p.end is None), key=lambda p: (p.index, p.incarnation))
    return tuple(EndingPod(p.name, end) for p in pods if (end := ends.get(p.node)) is not None)
