"""Objects of one job as an API server returns them, for tests of the command line."""

from __future__ import annotations

import time
from typing import Any

Json = dict[str, Any]


def stamp(seconds_ago: float = 0.0) -> str:
    """Return the RFC 3339 text of a time before now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds_ago))


def condition_of(kind: str, status: str, reason: str, message: str = "", ago: float = 60.0) -> Json:
    """Return a condition of a job, of a pod or of a Node."""
    return {
        "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp(ago),
    }  # fmt: skip


def a_job(name: str = "bert", *, status: Json | None = None, **spec: Any) -> Json:
    """Return a job that trains on two pods."""
    running = {
        "phase": "Running", "active": 2, "ready": 2, "replicas": 2, "targetReplicas": 2, "worldSize": 4,
        "rendezvousRound": 3, "restarts": 1, "restartsCountTowardsMax": 1, "lastRendezvousTime": stamp(30),
        "executionAttempts": 1, "observedGeneration": 1,
        "conditions": [
            condition_of("RendezvousReady", "True", "StoreAvailable"),
            condition_of("Running", "True", "WorldFormed", "4 workers on 2 pods"),
            condition_of("FullyScaled", "True", "AtDesiredReplicas"),
        ],
    }  # fmt: skip
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {
            "name": name, "namespace": "team", "uid": f"uid-{name}", "generation": 1, "resourceVersion": "5",
            "creationTimestamp": stamp(3600),
        },
        "spec": {"replicas": 2, "elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}, **spec},
        "status": running if status is None else status,
    }  # fmt: skip


def a_pod(index: int, *, job: str = "bert", incarnation: int = 0, role: str = "worker", **status: Any) -> Json:
    """Return a worker pod that runs, with two workers; `status` replaces fields of its status."""
    name = f"{job}-{index}-{incarnation}" if role == "worker" else f"{job}-rdzv-{incarnation}"
    container = "trainer" if role == "worker" else "store"
    env = [{"name": "ELASTICJOB_NPROC_PER_NODE", "value": "2"}]
    running = {"name": container, "restartCount": 0, "ready": True, "state": {"running": {"startedAt": stamp(60)}}}
    return {
        "metadata": {
            "name": name, "namespace": "team", "uid": f"uid-{name}", "creationTimestamp": stamp(120),
            "annotations": {"elasticjob.dev/trainer": container},
            "labels": {
                "elasticjob.dev/job-name": job, "elasticjob.dev/role": role, "elasticjob.dev/index": str(index),
                "elasticjob.dev/incarnation": str(incarnation),
            },
        },
        "spec": {"nodeName": f"node{index}", "containers": [{"name": container, "command": ["python3"], "env": env}]},
        "status": {
            "phase": "Running", "containerStatuses": [running],
            "conditions": [condition_of("Ready", "True", ""), condition_of("PodScheduled", "True", "")], **status,
        },
    }  # fmt: skip


def an_event(reason: str, message: str, *, name: str = "bert", kind: str = "ElasticJob", ago: float = 10.0,
             type_: str = "Normal", count: int = 1) -> Json:  # fmt: skip
    """Return an Event as client-go writes it."""
    return {
        "metadata": {"name": f"{name}.{reason}.{ago}", "namespace": "team", "resourceVersion": "8"},
        "involvedObject": {"kind": kind, "name": name, "namespace": "team"},
        "reason": reason, "message": message, "type": type_, "count": count, "lastTimestamp": stamp(ago),
    }  # fmt: skip
