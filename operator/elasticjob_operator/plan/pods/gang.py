"""Which new worker pods become members of the job's gang.

A spare or an additional pod for a cordoned node may take the place of a member, whose pod then goes. So members are
counted, and follow from no index. Schedulers place no member of a gang with fewer members than its size: without
enough of them, new pods are better placed one by one than never.
"""

from __future__ import annotations

from elasticjob_operator.manifests.gang import gang_name
from elasticjob_operator.model.job.spec import GangProvider
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pods.pod_decisions import KeepPod, PodDecision


def indices_to_join(ctx: ReconcileContext, decisions: tuple[PodDecision, ...]) -> frozenset[int]:
    """Return the indices whose next pod is a member: as many as members are missing at the target.

    None if the members were fewer than the gang's size all the same, or if the job has no gang.
    """
    if ctx.spec.gang is GangProvider.NONE:
        return frozenset()
    staying = {d.index: d.pod for d in decisions if isinstance(d.action, KeepPod) and d.pod is not None and d.pod.live}
    members = sum(pod.gang == gang_name(ctx.job) for pod in staying.values())
    # Those that are created later count too: a gang waits for them.
    missing = [d.index for d in decisions if d.index not in staying]
    joining = missing[: max(0, ctx.spec.target - members)]
    return frozenset(joining if members + len(joining) >= ctx.spec.min_replicas else ())
