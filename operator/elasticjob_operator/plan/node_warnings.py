"""What the warnings of nodes mean for a job. `pod_decisions`, `stores` and `standby` move its pods."""

from __future__ import annotations

from elasticjob.contract.messages import EndingPod
from elasticjob_operator.plan.context import ReconcileContext


def describe_leaving(ctx: ReconcileContext) -> str:
    """Return which worker pods must leave a node because its end is announced; empty if none must."""
    there = [p for p in ctx.observed.workers if p.end is None and p.node in ctx.notices]
    leaving = [p for p in there if p.node not in p.avoided_nodes]
    if not leaving:
        return ""
    first, more = leaving[0], f" and {len(leaving) - 1} more" if len(leaving) > 1 else ""
    return f"{first.name}{more} must leave: {first.node} has the {ctx.notices[first.node]}"


def ending_pods(ctx: ReconcileContext) -> tuple[EndingPod, ...] | None:
    """Return the live worker pods on nodes that are known to end at a certain time; None while Nodes are not watched.

    Also those that stay there because they were placed there all the same: they end with the machine.
    """
    if not ctx.observed.nodes_watched:
        return None
    ends = {name: warning.ends_at for name, warning in ctx.observed.warnings.items()}
    pods = sorted((p for p in ctx.observed.workers if p.end is None), key=lambda p: (p.index, p.incarnation))
    return tuple(EndingPod(p.name, end) for p in pods if (end := ends.get(p.node)) is not None)
