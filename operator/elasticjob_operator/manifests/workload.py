"""Kueue: the Workload that asks a queue for the worker pods' quota, its status, and what an admission adds to pods.

Stores are not in it: they are the operator's overhead, and a queue whose quota has GPUs only could not admit them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from elasticjob_operator.manifests.names import labels, metadata
from elasticjob_operator.model.cluster.raw import Raw, integer, mapping, objects, text, timestamp
from elasticjob_operator.model.cluster.workload import (
    POD_SETS,
    REPLACES,
    STEP,
    WORKER_PODS,
    PodChanges,
    Workload,
    WorkloadCondition,
)
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.observed import ELASTIC_ANNOTATION, Job

JOB_UID = "kueue.x-k8s.io/job-uid"
"""Label of a Workload by which Kueue's tools find it."""
REPLACEMENT_FOR = "kueue.x-k8s.io/workload-slice-replacement-for"
"""Annotation of a Workload: namespace and name of the one whose quota it takes over."""
QUICK_REQUEUE = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which the job is queued again at once. After any other, Kueue decides when."""
_CHANGE: TypeAlias = tuple[WorkloadCondition, bool, str, str]
"""Type, status, reason and message of a condition."""


def workload_names(job: Job) -> tuple[str, str]:
    """Return the names of the Workload and of the one that replaces it, by turns: at most 63 characters, as Kueue uses
    them as values of labels."""
    first = f"elasticjob-{job.name[:44]}-{job.uid[:5]}"
    return first, f"{first}-2"


def step_name(job: Job, index: int) -> str:
    """Return the name of the Workload of a step: at most 63 characters for an index below 100. A UID has no `s`, so it
    is the name of no other kind of Workload."""
    return f"elasticjob-{job.name[:41]}-{job.uid[:5]}-s{index}"


def workload_child(name: str) -> str:
    """Return a Workload as `Kind/name`."""
    return f"Workload/{name}"


def workload_manifest(
    job: Job, spec: JobSpec, name: str, priority: Raw, replaces: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    """Return the Workload of a job with a queue.

    `priority` are the fields of its spec for that, `replaces` is name and UID of the Workload that this one replaces.
    """
    meta = metadata(job, name, {**labels(job), JOB_UID: job.uid})
    request = workload_request(job, spec)
    annotations = request["metadata"]["annotations"] | ({ELASTIC_ANNOTATION: "true"} if job.queue_elastic else {})
    before, uid = replaces
    if before:
        annotations |= {REPLACEMENT_FOR: f"{job.namespace}/{before}", REPLACES: uid}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {**meta, "annotations": annotations},
        "spec": {**request["spec"], **priority},
    }


def step_manifest(job: Job, spec: JobSpec, index: int, count: int, priority: Raw) -> dict[str, Any]:
    """Return the Workload of a step, which asks for `count` pods or none. `priority` are the fields of its spec."""
    meta = metadata(job, step_name(job, index), {**labels(job), JOB_UID: job.uid})
    request = _request(job, spec, count)
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {**meta, "annotations": request["metadata"]["annotations"] | {STEP: str(index)}},
        "spec": {**request["spec"], **priority},
    }


def base_count(job: Job, spec: JobSpec) -> int:
    """Return for how many pods the Workload of the job itself asks: for the fewest if steps ask for the others."""
    return spec.min_replicas if job.step_priority else spec.settings.desired_pods


def workload_request(job: Job, spec: JobSpec) -> dict[str, Any]:
    """Return the part of a Workload that says in which queue it is, and what it asks for.

    An elastic job starts with any number of pods from its minimum on; one of fixed size with all or none, and so does
    one that Kueue may resize, because Kueue does not do both.
    """
    request = _request(job, spec, base_count(job, spec))
    if spec.min_replicas < base_count(job, spec) and not job.queue_elastic:
        request["spec"]["podSets"][0]["minCount"] = spec.min_replicas
    return request


def _request(job: Job, spec: JobSpec, count: int) -> dict[str, Any]:
    template = spec.template
    own = {name: dict(mapping(template, "metadata", name)) for name in ("labels", "annotations")}
    pods: dict[str, Any] = {
        "name": WORKER_PODS,
        "count": count,
        "template": {
            "metadata": {name: value for name, value in own.items() if value},
            "spec": {**mapping(template, "spec"), "restartPolicy": "Never"},
        },
    }
    marked = {"annotations": {POD_SETS: job.template_digest}}
    return {"metadata": marked, "spec": {"queueName": job.queue, "podSets": [pods]}}


def asks_for(workload: Workload, job: Job, spec: JobSpec) -> bool:
    """Return whether the Workload asks the job's queue for what the spec says. Kueue may have dropped `minCount`.

    One of an older operator does not say for which pods it asks.
    """
    wanted = base_count(job, spec)
    same_minimum = workload.min_count is None or workload.min_count == spec.min_replicas
    same_pods = workload.template == job.template_digest
    same_priority = workload.priority_class == priority_class(job, spec)
    return workload.queue == job.queue and workload.count == wanted and same_minimum and same_pods and same_priority


def priority_class(job: Job, spec: JobSpec) -> str:
    """Return the name of the class of the Workload's priority: that of the job's label, else of its pods."""
    return job.queue_priority or text(spec.template, "spec", "priorityClassName")


# ---- status ----------------------------------------------------------------------------------------------------


def released_status(raw: Raw, now: float) -> dict[str, Any]:
    """Return the status of an evicted Workload without its quota, from which Kueue may admit it again, for all pods.

    Kueue takes what was reclaimed off what a waiting Workload asks for, and refuses a `count` that is lower than that.
    """
    evicted = next((c for c in objects(raw, "status", "conditions") if _is(c, WorkloadCondition.EVICTED)), {})
    reason, message = text(evicted, "reason") or "Evicted", text(evicted, "message")
    unready = "the job waits to be admitted again"
    changes: list[_CHANGE] = [
        (WorkloadCondition.REQUEUED, reason in QUICK_REQUEUE, reason, message),
        (WorkloadCondition.QUOTA_RESERVED, False, "Pending", message),
        (WorkloadCondition.ADMITTED, False, "NoReservation", "no quota is reserved"),
        (WorkloadCondition.PODS_READY, False, "WaitForStart", unready),
    ]
    status = _with_conditions(raw, now, changes)
    for gone in ("admission", "reclaimablePods"):
        status.pop(gone, None)
    return status


def finished_status(raw: Raw, now: float, *, succeeded: bool, message: str) -> dict[str, Any]:
    """Return the status of the Workload of a job that has ended. Kueue then counts its quota as free."""
    reason = "Succeeded" if succeeded else "Failed"
    return _with_conditions(raw, now, [(WorkloadCondition.FINISHED, True, reason, message)])


def ready_status(raw: Raw, now: float, *, ready: bool) -> dict[str, Any]:
    """Return the status of the Workload of a job that trains, or that has too few pods to train. Kueue may evict one
    that does not start, or does not recover, in time."""
    reason, message = ("Started", "the job trains") if ready else ("WaitForRecovery", "the job has too few pods")
    return _with_conditions(raw, now, [(WorkloadCondition.PODS_READY, ready, reason, message)])


def reclaimed_status(raw: Raw, now: float, *, count: int) -> dict[str, Any]:
    """Return the status of a Workload that gives the quota of `count` pods back."""
    return {**mapping(raw, "status"), "reclaimablePods": [{"name": WORKER_PODS, "count": count}]}


def _is(condition: Raw, kind: WorkloadCondition) -> bool:
    return text(condition, "type") == kind.value


def _with_conditions(raw: Raw, now: float, changes: list[_CHANGE]) -> dict[str, Any]:
    """Return the status with these conditions; all other fields and conditions stay."""
    conditions = {text(c, "type"): dict(c) for c in objects(raw, "status", "conditions")}
    for kind, true, reason, message in changes:
        before = conditions.get(kind.value, {})
        value = "True" if true else "False"
        since = before.get("lastTransitionTime") if before.get("status") == value else None
        conditions[kind.value] = {
            "type": kind.value,
            "status": value,
            "reason": reason,
            "message": message[:32768],
            "observedGeneration": integer(raw, "metadata", "generation"),
            "lastTransitionTime": since or timestamp(now),
        }
    return {**mapping(raw, "status"), "conditions": list(conditions.values())}


# ---- pods ------------------------------------------------------------------------------------------------------


def apply_admission(pod: dict[str, Any], changes: PodChanges) -> None:
    """Add to a worker pod, in place, what the admission says. What the pod has already stays as it is."""
    meta, spec = pod["metadata"], pod["spec"]
    added = (
        (meta, "labels", changes.labels),
        (meta, "annotations", changes.annotations),
        (spec, "nodeSelector", changes.node_selector),
    )
    for owner, name, values in added:
        if values:
            owner[name] = {**values, **(owner.get(name) or {})}
    own = list(spec.get("tolerations") or [])
    if new := [dict(item) for item in changes.tolerations if item not in own]:
        spec["tolerations"] = own + new
