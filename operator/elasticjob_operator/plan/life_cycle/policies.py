"""The job's PodDisruptionBudget and its NetworkPolicy: when they exist, and what they say."""

from __future__ import annotations

from elasticjob_operator.actions import DeletePolicy, WritePolicy
from elasticjob_operator.manifests.names import policy_name
from elasticjob_operator.model.observed import DisruptionBudget, NetworkPolicy, Policy
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.pods.cordons import may_have_cordon_spares, pods_not_ready


def plan_policies(ctx: ReconcileContext) -> Actions:
    """Return the actions for the policies of a job that runs.

    A job that is suspended or has ended keeps its NetworkPolicy until the job runs again or is deleted: its pods may
    still end, and a policy without pods does nothing.
    """
    if not ctx.observed.policies.known:
        return Actions()
    network, budget, at_least = ctx.observed.policies.network, ctx.observed.policies.budget, _wanted_min_available(ctx)
    wanted = NetworkPolicy(network.uid if network else "", ctx.spec.port, ctx.observed.operator_namespace)
    isolated = _write(ctx, network, wanted) if ctx.spec.network_isolation else _delete(network)
    if at_least is None:
        return isolated + _delete(budget)
    if budget is None and not any(pod.live and pod.ready for pod in ctx.observed.workers):
        return isolated  # it protects Ready pods only, and no pod's creation waits for its request
    return isolated + _write(ctx, budget, DisruptionBudget(budget.uid if budget else "", at_least))


def delete_disruption_budget(ctx: ReconcileContext) -> Actions:
    """Delete the PodDisruptionBudget of a job that is to have none."""
    return _delete(ctx.observed.policies.budget)


def _write(ctx: ReconcileContext, policy: Policy | None, wanted: Policy) -> Actions:
    if policy is None:
        return Actions((WritePolicy(wanted),) if ctx.may_create(f"{wanted.kind}/{policy_name(ctx.job.name)}") else ())
    return Actions((WritePolicy(wanted),) if policy != wanted else ())


def _delete(policy: Policy | None) -> Actions:
    return Actions(() if policy is None else (DeletePolicy(policy),))


def _wanted_min_available(ctx: ReconcileContext) -> int | None:
    """Return how many workers an eviction must leave; None for no budget.

    The budget of a job with no pod to spare refuses every eviction until the job starts more pods for those on a
    cordoned node. A job that cannot do that has none: no drain would end.
    """
    low, withdrawn = ctx.spec.min_replicas, ctx.status.scaled_down
    if not ctx.spec.disruption_budget:
        return None
    if ctx.cordon_spares:
        # Kubernetes counts a pod whose container has started as Ready, before its agent can train.
        return low + pods_not_ready(ctx)
    if ctx.spec.settings.desired_pods - (len(withdrawn.indices) if withdrawn else 0) > low:
        return low
    may_have = may_have_cordon_spares(ctx)
    if may_have is None:
        budget = ctx.observed.policies.budget
        return None if budget is None else budget.min_available
    return low if may_have and withdrawn is None else None
