"""Names, labels and owner of a job's children."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND, VERSION, Label, Role
from elasticjob_operator.model.observed import Job

SUFFIX = "rdzv"
"""The CRD forbids job names that end in `-rdzv`, so two jobs never name their children alike."""


def worker_pod(job: str, index: int, incarnation: int) -> str:
    return f"{job}-{index}-{incarnation}"


def job_of_worker_pod(pod: str) -> str:
    """Return the job that a worker pod of this name belongs to."""
    return pod.rsplit("-", 2)[0]


def store_pod(job: str, incarnation: int) -> str:
    return f"{job}-{SUFFIX}-{incarnation}"


def nodes_service(job: str) -> str:
    return job


def store_service(job: str) -> str:
    return f"{job}-{SUFFIX}"


def policy_name(job: str) -> str:
    """Return the name of the PodDisruptionBudget and of the NetworkPolicy."""
    return job


def key_secret(job: Job) -> str:
    """Return the name of the Secret with the keys of the execution. Those of earlier ones go with the job.

    Executions that an operator of 0.1.0 has started have no key id.
    """
    number = attempt(job)
    if job.status.key_id:
        return f"{job.name}-{SUFFIX}-{job.status.key_id}"
    return f"{job.name}-{SUFFIX}" if number == 1 else f"{job.name}-{SUFFIX}-{number}"


def endpoint(job: Job, port: int) -> str:
    """Return the `host:port` of the job's store."""
    return f"{store_service(job.name)}.{job.namespace}.svc:{port}"


def labels(job: Job) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        Label.JOB_NAME: job.name,
        Label.JOB_UID: job.uid,
        "app.kubernetes.io/name": "elasticjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "elasticjob",
    }


def role_selector(job: Job, role: Role) -> dict[str, str]:
    """Return the selector of one job's pods of one role."""
    return {Label.JOB_NAME: job.name, Label.JOB_UID: job.uid, Label.ROLE: role.value}


def pod_labels(job: Job, role: Role, index: int, incarnation: int) -> dict[str, str]:
    return labels(job) | {
        Label.ROLE: role.value,
        Label.INDEX: str(index),
        Label.INCARNATION: str(incarnation),
        Label.EXECUTION_ATTEMPT: str(attempt(job)),
        "app.kubernetes.io/component": role.value,
    }


def attempt(job: Job) -> int:
    """Return the execution attempt that new children belong to, from 1."""
    return max(1, job.status.execution_attempts)


def metadata(job: Job, name: str, own_labels: dict[str, str]) -> dict[str, Any]:
    """Return metadata of a child; Kubernetes deletes the child after its owner, the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": own_labels,
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
