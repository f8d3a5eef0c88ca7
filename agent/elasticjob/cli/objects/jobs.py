"""What the verbs say about an ElasticJob. Pure."""

from __future__ import annotations

from typing import Any

from elasticjob.cli.cluster.resources import KubeObject


def job_status(job: KubeObject) -> dict[str, Any]:
    """Return the status of a job; empty if no operator has written one."""
    status: dict[str, Any] = job.get("status") or {}
    return status


def job_condition(job: KubeObject, kind: str) -> dict[str, Any]:
    """Return a condition of a job; empty without it."""
    return next((c for c in job_status(job).get("conditions") or [] if c.get("type") == kind), {})


def is_true(job: KubeObject, kind: str) -> bool:
    """Return whether a condition of a job is True."""
    return bool(job_condition(job, kind).get("status") == "True")


def has_finished(job: KubeObject) -> bool:
    return is_true(job, "Complete") or is_true(job, "Failed")


def wanted_replicas(job: KubeObject) -> int:
    """Return how many worker pods the spec asks for, as its default is."""
    spec = job.get("spec", {})
    replicas = spec.get("replicas") or (spec.get("elasticPolicy") or {}).get("maxReplicas") or 1
    return int(replicas)


def size_bounds(job: KubeObject) -> tuple[int, int]:
    """Return the least and the most worker pods of a job; the same number if its size is fixed."""
    policy = job.get("spec", {}).get("elasticPolicy") or {}
    wanted = wanted_replicas(job)
    if "minReplicas" not in policy and "maxReplicas" not in policy:
        return wanted, wanted
    return int(policy.get("minReplicas") or 1), int(policy.get("maxReplicas") or wanted)
