"""The job's PodDisruptionBudget: when it exists, and what it says."""

from __future__ import annotations

from elasticjob_operator.actions import CreateDisruptionBudget, DeleteDisruptionBudget, UpdateDisruptionBudget
from elasticjob_operator.manifests.names import disruption_budget
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.cordons import may_have_cordon_spares, pods_not_ready


def plan_policies(ctx: ReconcileContext) -> Actions:
    """Return the actions for the policies of a job that runs."""
    wanted, budget = _wanted_min_available(ctx), ctx.observed.policies.budget
    if wanted is None:
        return delete_disruption_budget(ctx)
    if budget is None:
        may_create = ctx.may_create(f"PodDisruptionBudget/{disruption_budget(ctx.job.name)}")
        return Actions((CreateDisruptionBudget(wanted),) if may_create else ())
    if budget.min_available != wanted:
        return Actions((UpdateDisruptionBudget(budget.uid, wanted),))
    return Actions()


def delete_disruption_budget(ctx: ReconcileContext) -> Actions:
    """Delete the PodDisruptionBudget of a job that is to have none."""
    budget = ctx.observed.policies.budget
    return Actions(() if budget is None else (DeleteDisruptionBudget(budget.uid),))


def _wanted_min_available(ctx: ReconcileContext) -> int | None:
    """Return how many workers an eviction must leave; None for no budget.

    The budget of a job with no pod to spare refuses every eviction until the job starts more pods for those on a
    cordoned node. A job that cannot do that has none: no drain would end.
    """
    low, withdrawn = ctx.spec.min_replicas, ctx.status.scaled_down
    if not ctx.spec.disruption_budget:
        return None
    if ctx.cordon_spares:
        # Kubernetes counts a pod whose container has started as Ready, before its node can train.
        return low + pods_not_ready(ctx)
    if ctx.spec.settings.desired_pods - (len(withdrawn.indices) if withdrawn else 0) > low:
        return low
    may_have = may_have_cordon_spares(ctx)
    if may_have is None:
        budget = ctx.observed.policies.budget
        return None if budget is None else budget.min_available
    return low if may_have and withdrawn is None else None
