"""Kueue's API. A cluster has it only where an administrator installed it."""

from __future__ import annotations

import asyncio
from typing import Any

from elasticjob._runtime.contract.names import Label
from elasticjob_operator.kube.api import (
    KUEUE_WORKLOADS,
    PRIORITY_CLASSES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    KubeApi,
    Resource,
)
from elasticjob_operator.kube.errors import KubeError, NotFound, Refused
from elasticjob_operator.model.cluster.raw import Raw, integer, text
from elasticjob_operator.model.cluster.workload import PodChanges, assigned_flavors, pod_changes
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.observed import Job


async def find_workload(api: KubeApi, namespace: str, name: str) -> dict[str, Any] | None:
    """Return the Workload, or None if it or its API does not exist. Refused: the operator may not read it."""
    try:
        return await api.get(KUEUE_WORKLOADS, namespace, name)
    except NotFound:
        return None


async def list_workloads(api: KubeApi, namespace: str, job_uid: str) -> list[dict[str, Any]]:
    """Return all Workloads with the label of this job; none if the API does not exist. Refused: it may not read them.

    Others may bear a copy of the label.
    """
    try:
        return await api.list(KUEUE_WORKLOADS, namespace, f"{Label.JOB_UID}={job_uid}")
    except NotFound:
        return []


async def read_priority(api: KubeApi, job: Job, spec: JobSpec) -> dict[str, Any]:
    """Return the fields of a Workload's spec for its priority: that of the job's label, else of its pods; empty
    without either. NotFound: the class does not exist."""
    if name := job.queue_priority:
        return await _priority_of(api, WORKLOAD_PRIORITY_CLASSES, "WorkloadPriorityClass", name)
    if name := text(spec.template, "spec", "priorityClassName"):
        return await _priority_of(api, PRIORITY_CLASSES, "PriorityClass", name)
    return {}


async def read_step_priority(api: KubeApi, job: Job) -> dict[str, Any]:
    """Return the same for the Workload of a step."""
    return await _priority_of(api, WORKLOAD_PRIORITY_CLASSES, "WorkloadPriorityClass", job.step_priority)


async def _priority_of(api: KubeApi, resource: Resource, kind: str, name: str) -> dict[str, Any]:
    found = await api.get(resource, None, name)
    reference = {"group": resource.group, "kind": kind, "name": name}
    return {"priority": integer(found, "value"), "priorityClassRef": reference}


async def read_pod_changes(api: KubeApi, workload: Raw) -> PodChanges:
    """Return what the admission of this Workload adds to worker pods. KubeError: a flavor cannot be read."""
    flavors = await asyncio.gather(*(api.get(RESOURCE_FLAVORS, None, name) for name in assigned_flavors(workload)))
    return pod_changes(workload, flavors)


def explain_workload_refusal(error: KubeError) -> str:
    """Return why a Workload could not be created, and what to do about it."""
    if isinstance(error, NotFound):
        described = f"{KUEUE_WORKLOADS.plural}.{KUEUE_WORKLOADS.group}/{KUEUE_WORKLOADS.version}"
        return (
            f"the cluster has no {described}: install Kueue 0.15 or newer and restart the operator, "
            "or remove the job's label kueue.x-k8s.io/queue-name"
        )
    if error.status == 403 and not (isinstance(error, Refused) and error.quota):
        return f"{error}: set kueue.enabled to true in the values of elasticjob's chart"
    return str(error)


def explain_priority_refusal(error: KubeError) -> str:
    """Return why the priority of a Workload is unknown, and what to do about it."""
    if isinstance(error, NotFound):
        return f"{error}: create this priority class, or correct the job's label or spec.template that names it"
    return explain_workload_refusal(error)
