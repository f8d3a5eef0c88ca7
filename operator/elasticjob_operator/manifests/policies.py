"""Manifest of the policy object that limits what others do to a job's pods, and how it is read."""

from __future__ import annotations

from typing import Any

from elasticjob.contract.names import Role
from elasticjob_operator.manifests.names import disruption_budget, labels, metadata, role_selector
from elasticjob_operator.model.observed import DisruptionBudget, Job
from elasticjob_operator.model.raw import Raw, integer, text


def disruption_budget_manifest(job: Job, min_available: int) -> dict[str, Any]:
    """Return the PodDisruptionBudget of the workers: an eviction must leave `min_available` of them Ready.

    A worker that is not Ready does not train: it may be evicted at any time.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, disruption_budget(job.name), labels(job)),
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": role_selector(job, Role.WORKER)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def read_disruption_budget(raw: Raw) -> DisruptionBudget:
    """Return what the operator must know of a PodDisruptionBudget."""
    return DisruptionBudget(text(raw, "metadata", "uid"), integer(raw, "spec", "minAvailable"))
