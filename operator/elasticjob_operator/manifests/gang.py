"""Gang scheduling: the object that has a gang's size, and how worker pods become members of the gang.

Members are as many worker pods as the target says (`plan.pods.gang`). The others, which are standby nodes at first, and
stores are none: a scheduler that counted them would place a gang that cannot train.
"""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND
from elasticjob_operator.manifests.names import labels, metadata
from elasticjob_operator.model.cluster.pods import COSCHEDULING_LABEL, VOLCANO_ANNOTATION
from elasticjob_operator.model.cluster.raw import Raw, integer, objects, text
from elasticjob_operator.model.job.spec import GangProvider, JobSpec
from elasticjob_operator.model.observed import Job

VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Annotation of a pod template: Volcano's queue."""
VOLCANO_SCHEDULER = "volcano"
WORKLOAD_GROUP = "workers"
"""Name of the pod group in a Workload."""
IMMUTABLE = frozenset({GangProvider.KUBERNETES})
"""Providers whose gang object cannot get another size."""
_API_VERSIONS = {
    GangProvider.KUBERNETES: "scheduling.k8s.io/v1alpha1",
    GangProvider.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
    GangProvider.VOLCANO: "scheduling.volcano.sh/v1beta1",
}


def gang_name(job: Job) -> str:
    return job.name


def gang_child(job: Job, spec: JobSpec) -> str:
    """Return the gang object as `Kind/name`; empty if the job has none."""
    return "" if spec.gang is GangProvider.NONE else f"{_kind(spec)}/{gang_name(job)}"


def _kind(spec: JobSpec) -> str:
    return "Workload" if spec.gang is GangProvider.KUBERNETES else "PodGroup"


def gang_manifest(job: Job, spec: JobSpec) -> dict[str, Any]:
    """Return the gang object of a job that has a gang provider."""
    body = {
        "apiVersion": _API_VERSIONS[spec.gang],
        "kind": _kind(spec),
        "metadata": metadata(job, gang_name(job), labels(job)),
    }
    if spec.gang is GangProvider.KUBERNETES:
        return body | {"spec": _workload_spec(job, spec)}
    return body | gang_resize(spec.min_replicas, _volcano_fields(spec) if spec.gang is GangProvider.VOLCANO else {})


def gang_resize(size: int, others: Raw | None = None) -> dict[str, Any]:
    """Return the part of a PodGroup that has its size; `others` are further fields of its spec."""
    return {"spec": {"minMember": size, **(others or {})}}


def read_gang_size(raw: Raw) -> int:
    """Return how many pods a gang object of any provider asks for."""
    groups = objects(raw, "spec", "podGroups")
    return integer(groups[0], "policy", "gang", "minCount") if groups else integer(raw, "spec", "minMember")


def _workload_spec(job: Job, spec: JobSpec) -> dict[str, Any]:
    return {
        "controllerRef": {"apiGroup": GROUP, "kind": KIND, "name": job.name},
        "podGroups": [{"name": WORKLOAD_GROUP, "policy": {"gang": {"minCount": spec.min_replicas}}}],
    }


def _volcano_fields(spec: JobSpec) -> dict[str, str]:
    """Return the fields that Volcano reads from a PodGroup, not from its pods."""
    fields = {
        "queue": text(spec.template, "metadata", "annotations", VOLCANO_QUEUE),
        "priorityClassName": text(spec.template, "spec", "priorityClassName"),
    }
    return {name: value for name, value in fields.items() if value}


def join_gang(pod: dict[str, Any], job: Job, spec: JobSpec, *, outside_gang: bool) -> None:
    """Make the worker pod a member of the gang, in place; leave one that is to be `outside_gang` as it is."""
    if spec.gang is GangProvider.VOLCANO:
        pod["spec"]["schedulerName"] = pod["spec"].get("schedulerName") or VOLCANO_SCHEDULER
    if outside_gang:
        return
    if spec.gang is GangProvider.COSCHEDULING:
        pod["metadata"]["labels"][COSCHEDULING_LABEL] = gang_name(job)
    elif spec.gang is GangProvider.VOLCANO:
        pod["metadata"]["annotations"][VOLCANO_ANNOTATION] = gang_name(job)
    elif spec.gang is GangProvider.KUBERNETES:
        pod["spec"]["workloadRef"] = {"name": gang_name(job), "podGroup": WORKLOAD_GROUP}
