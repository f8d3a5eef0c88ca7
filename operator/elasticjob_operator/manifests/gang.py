"""Gang scheduling: the object that has a gang's size, and how worker pods become members of the gang.

Members are as many worker pods as the target says (`plan.pods.gang`). The others, which are standby nodes at first, and
stores are none: a scheduler that counted them would place a gang that cannot train.
"""

from __future__ import annotations

from typing import Any

from elasticjob_operator.manifests.names import labels, metadata
from elasticjob_operator.model.cluster.pods import COSCHEDULING_LABEL, VOLCANO_ANNOTATION
from elasticjob_operator.model.cluster.raw import Raw, integer, text
from elasticjob_operator.model.job.spec import GangProvider, JobSpec
from elasticjob_operator.model.observed import Job

VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Annotation of a pod template: Volcano's queue."""
VOLCANO_SCHEDULER = "volcano"
_KIND = "PodGroup"
_API_VERSIONS = {
    GangProvider.KUBERNETES: "scheduling.k8s.io/v1beta1",
    GangProvider.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
    GangProvider.VOLCANO: "scheduling.volcano.sh/v1beta1",
}


def gang_name(job: Job) -> str:
    return job.name


def gang_child(job: Job, spec: JobSpec) -> str:
    """Return the gang object as `Kind/name`; empty if the job has none."""
    return "" if spec.gang is GangProvider.NONE else f"{_KIND}/{gang_name(job)}"


def gang_manifest(job: Job, spec: JobSpec) -> dict[str, Any]:
    """Return the gang object of a job that has a gang provider."""
    body = {
        "apiVersion": _API_VERSIONS[spec.gang],
        "kind": _KIND,
        "metadata": metadata(job, gang_name(job), labels(job)),
    }
    resized = gang_resize(spec.gang, spec.min_replicas)
    return body | {"spec": resized["spec"] | _other_fields(spec)}


def gang_resize(provider: GangProvider, size: int) -> dict[str, Any]:
    """Return the part of the gang object that has its size."""
    if provider is GangProvider.KUBERNETES:
        return {"spec": {"schedulingPolicy": {"gang": {"minCount": size}}}}
    return {"spec": {"minMember": size}}


def read_gang_size(raw: Raw) -> int:
    """Return how many pods a gang object of any provider asks for."""
    return integer(raw, "spec", "schedulingPolicy", "gang", "minCount") or integer(raw, "spec", "minMember")


def _other_fields(spec: JobSpec) -> dict[str, str]:
    """Return what a scheduler reads from the gang object besides its size, or compares with the pods."""
    fields = {}
    if spec.gang is GangProvider.VOLCANO:
        fields["queue"] = text(spec.template, "metadata", "annotations", VOLCANO_QUEUE)
    if spec.gang is not GangProvider.COSCHEDULING:
        # Kubernetes places no pod whose priority is not that of its PodGroup.
        fields["priorityClassName"] = text(spec.template, "spec", "priorityClassName")
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
        pod["spec"]["schedulingGroup"] = {"podGroupName": gang_name(job)}
