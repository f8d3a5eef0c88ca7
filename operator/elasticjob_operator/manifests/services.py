"""Manifests of a job's two Services and of the Secret with its keys."""

from __future__ import annotations

import base64
from typing import Any

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.manifests.names import (
    key_secret,
    labels,
    metadata,
    nodes_service,
    role_selector,
    store_service,
)
from elasticjob_operator.model.observed import Job

NODE_KEY = "node"
OPERATOR_KEY = "operator"
"""Data keys of the Secret; the values are hexadecimal."""


def secret_manifest(job: Job, keys: dict[str, str]) -> dict[str, Any]:
    """Return the Secret; `keys` are hexadecimal, by data key."""
    data = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
    meta = metadata(job, key_secret(job), labels(job))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "immutable": True, "data": data}


def nodes_service_manifest(job: Job) -> dict[str, Any]:
    """Return the workers' headless Service. It publishes pods that are not Ready, as workers connect before that."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": role_selector(job, Role.WORKER),
    }
    return _service(job, nodes_service(job.name), spec)


def store_service_manifest(job: Job, port: int, incarnation: int) -> dict[str, Any]:
    """Return the Service of the store. It selects one incarnation: a replaced store gets no new connections."""
    spec = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": store_selector(job, incarnation),
        "ports": [{"name": "rendezvous", "port": port, "targetPort": port, "protocol": "TCP"}],
    }
    return _service(job, store_service(job.name), spec)


def store_selector(job: Job, incarnation: int) -> dict[str, str]:
    return role_selector(job, Role.STORE) | {Label.INCARNATION: str(incarnation)}


def _service(job: Job, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(job, name, labels(job)), "spec": spec}
