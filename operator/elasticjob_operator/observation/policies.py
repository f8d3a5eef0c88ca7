"""Read the job's policies and keep them in memory: the operator does not watch them, and reads them rarely."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from elasticjob_operator.kube import BUDGETS, NETWORK_POLICIES, KubeApi, NotFound, Refused, Resource
from elasticjob_operator.manifests import policy_name
from elasticjob_operator.manifests.policies import read_disruption_budget, read_network_policy
from elasticjob_operator.model.observed import DisruptionBudget, Job, Policies, Policy, is_owned
from elasticjob_operator.observation.job_memory import JobMemory

POLICIES = (BUDGETS, NETWORK_POLICIES)
"""The resource types of policies."""
POLICIES_SECONDS = 3600.0
"""Policies change only when another client changes them: they are read this often, in seconds. The operator's own
creates and patches return the object, so it is not read after them, nor after its deletes."""


def policy_resource(policy: Policy) -> Resource:
    return BUDGETS if isinstance(policy, DisruptionBudget) else NETWORK_POLICIES


async def read_policies(api: KubeApi, job: Job, memory: JobMemory, now: float) -> Policies:
    """Return the policies that the job owns: from memory, unless it has none or they are old.

    A job without status has no children yet: nothing is read.
    """
    if memory.policies is None or now >= memory.policies_at + POLICIES_SECONDS:
        policies = Policies()
        if job.status.raw:
            found = await asyncio.gather(*(_find(api, resource, job) for resource in POLICIES))
            for resource, raw in zip(POLICIES, found, strict=True):
                policies = with_policy(policies, resource, raw)
        memory.policies, memory.policies_at = policies, now
    return memory.policies


def with_policy(policies: Policies, resource: Resource, raw: dict[str, Any] | None) -> Policies:
    """Return the policies with this object instead of the one of its type; `raw` None: with none of its type."""
    if resource is BUDGETS:
        return replace(policies, budget=None if raw is None else read_disruption_budget(raw))
    if resource is NETWORK_POLICIES:
        return replace(policies, network=None if raw is None else read_network_policy(raw))
    return policies


async def _find(api: KubeApi, resource: Resource, job: Job) -> dict[str, Any] | None:
    """Return the job's object; None if there is none, another owner's, or one that the operator may not read: then it
    may not create it either, and says so."""
    try:
        found = await api.get(resource, job.namespace, policy_name(job.name))
    except (NotFound, Refused):
        return None
    return found if is_owned(found, job.uid) else None
