"""What the scale subresource counts: the pods that `replicas` asks for, without spares.

An autoscaler averages over the pods that `status.selector` selects. Standby pods do no work, so they would lower the
average. A spare may take the place of any pod, so the selector names the indices that are spares now.
"""

from __future__ import annotations

from elasticjob._runtime.contract.messages import RoundPhase
from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.plan.context import ReconcileContext


def spare_indices(ctx: ReconcileContext) -> frozenset[int]:
    """Return the indices of the spares: the highest ones of those outside the running round.

    While no round is known to run, they stay what they were.
    """
    spares = max(0, len(ctx.indices) - ctx.spec.target)
    if ctx.report is not None and ctx.report.phase is RoundPhase.RUNNING:
        outside = frozenset(ctx.indices) - {agent.index for agent in ctx.report.nodes if agent.member}
    else:
        outside = ctx.status.spares
    ordered = sorted(ctx.indices, key=lambda index: (index in outside, index))
    return frozenset(ordered[len(ordered) - spares :])


def pod_selector(ctx: ReconcileContext, spares: frozenset[int]) -> str:
    """Return `status.selector`."""
    workers = f"{Label.JOB_NAME}={ctx.job.name},{Label.ROLE}={Role.WORKER.value}"
    return f"{workers},{Label.INDEX} notin ({','.join(map(str, sorted(spares)))})" if spares else workers
