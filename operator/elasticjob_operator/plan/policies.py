"""The job's PodDisruptionBudget and its NetworkPolicy: when they exist, and what they say."""

from __future__ import annotations

from elasticjob_operator.actions import (
    CreateDisruptionBudget,
    CreateNetworkPolicy,
    DeleteDisruptionBudget,
    DeleteNetworkPolicy,
    UpdateDisruptionBudget,
    UpdateNetworkPolicy,
)
from elasticjob_operator.manifests.names import disruption_budget, network_policy
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.cordons import may_have_cordon_spares, pods_not_ready


def plan_policies(ctx: ReconcileContext) -> Actions:
    """Return the actions for the policies of a job that runs."""
    if not ctx.observed.policies.known:
        return Actions()
    return _plan_network_policy(ctx) + _plan_disruption_budget(ctx)


def _plan_network_policy(ctx: ReconcileContext) -> Actions:
    """Return the action for the NetworkPolicy.

    A job that is suspended or has ended keeps it until the job runs again or is deleted: its pods may still end, and
    a policy without pods does nothing.
    """
    policy, namespace = ctx.observed.policies.network, ctx.observed.operator_namespace
    if not ctx.spec.network_isolation:
        return Actions(() if policy is None else (DeleteNetworkPolicy(policy.uid),))
    if policy is None:
        may_create = ctx.may_create(f"NetworkPolicy/{network_policy(ctx.job.name)}")
        return Actions((CreateNetworkPolicy(namespace),) if may_create else ())
    if (policy.store_port, policy.operator_namespace) != (ctx.spec.port, namespace):
        return Actions((UpdateNetworkPolicy(policy.uid, namespace),))
    return Actions()


def _plan_disruption_budget(ctx: ReconcileContext) -> Actions:
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
