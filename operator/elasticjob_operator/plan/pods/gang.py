"""Which new worker pods become members of the job's gang, and which ones wait until the gang has its Nodes.

A spare or an additional pod for a cordoned node may take the place of a member, whose pod then goes. So members are
counted, and follow from no index. Schedulers place no member of a gang with fewer members than its size: without
enough of them, new pods are better placed one by one than never.

A pod that is not a member is placed by itself. If it came before the gang has its Nodes, the spares of two jobs could
hold the Nodes that the gang of each needs, and neither would ever train.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.manifests.gang import gang_name
from elasticjob_operator.model.job.spec import GangProvider
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pods.pod_decisions import KeepPod, PodDecision


@dataclass(frozen=True)
class GangPlan:
    """What the job's gang decides about pods that do not exist yet."""

    joining: frozenset[int] = frozenset()
    """The indices whose next pod is a member."""
    waiting: frozenset[int] = frozenset()
    """The indices whose next pod is none, and is created once the gang has its Nodes."""


def plan_gang(ctx: ReconcileContext, decisions: tuple[PodDecision, ...]) -> GangPlan:
    """Return who joins: as many pods as members are missing at the target. The others wait for the gang.

    No pod joins or waits if the members were fewer than the gang's size all the same, or if the job has no gang.
    """
    if ctx.spec.gang is GangProvider.NONE:
        return GangPlan()
    staying = {d.index: d.pod for d in decisions if isinstance(d.action, KeepPod) and d.pod is not None and d.pod.live}
    members = [pod for pod in staying.values() if pod.gang == gang_name(ctx.job)]
    # Those that are created later count too: a gang waits for them.
    missing = [d.index for d in decisions if d.index not in staying]
    joining = missing[: max(0, ctx.spec.target - len(members))]
    if len(members) + len(joining) < ctx.spec.min_replicas:
        return GangPlan()
    placed = sum(bool(pod.node) for pod in members) >= ctx.spec.min_replicas
    return GangPlan(frozenset(joining), frozenset(() if placed else missing[len(joining) :]))
