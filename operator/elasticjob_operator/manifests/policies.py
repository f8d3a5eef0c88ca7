"""Manifests of the policy objects that limit what others do to a job's pods, and how they are read."""

from __future__ import annotations

from typing import Any

from elasticjob.contract.names import Label, Role
from elasticjob_operator.manifests.names import disruption_budget, labels, metadata, network_policy, role_selector
from elasticjob_operator.model.observed import DisruptionBudget, Job, NetworkPolicy
from elasticjob_operator.model.raw import Raw, integer, objects, text

OPERATOR_LABELS = {"app.kubernetes.io/name": "elasticjob", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods. The release is none of them: one of another name may take over the jobs."""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets in each namespace."""


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


def network_policy_manifest(job: Job, store_port: int, operator_namespace: str) -> dict[str, Any]:
    """Return the NetworkPolicy of the job's pods.

    They accept connections from each other. The operator may connect to the store's port, of all pods, because workers
    do not listen on it. An operator that runs in no pod (empty `operator_namespace`) has no labels: then the port is
    open, and the store's keys protect it.
    """
    pods = {"podSelector": {"matchLabels": {Label.JOB_UID: job.uid}}}
    operators = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    store = {"ports": [{"protocol": "TCP", "port": store_port}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, network_policy(job.name), labels(job)),
        "spec": {
            **pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [pods]}, store | ({"from": [operators]} if operator_namespace else {})],
        },
    }


def read_network_policy(raw: Raw) -> NetworkPolicy:
    """Return what the operator must know of a NetworkPolicy."""
    rules = [rule for rule in objects(raw, "spec", "ingress") if objects(rule, "ports")]
    port = next((integer(port, "port") for rule in rules for port in objects(rule, "ports")), 0)
    sources = [source for rule in rules for source in objects(rule, "from")]
    namespace = next((text(s, "namespaceSelector", "matchLabels", _NAMESPACE_NAME) for s in sources), "")
    return NetworkPolicy(text(raw, "metadata", "uid"), port, namespace)
