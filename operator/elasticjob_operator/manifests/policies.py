"""Manifests of the policy objects that limit what others do to a job's pods, and how they are read."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.manifests.names import labels, metadata, policy_name, role_selector
from elasticjob_operator.model.cluster.raw import Raw, integer, objects, text
from elasticjob_operator.model.observed import DisruptionBudget, Job, NetworkPolicy, Policy

OPERATOR_LABELS = {"app.kubernetes.io/name": "elasticjob", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods. The release is none of them: one of another name may take over the jobs."""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets in each namespace."""


def policy_manifest(job: Job, policy: Policy) -> dict[str, Any]:
    """Return the manifest of a policy."""
    match policy:
        case DisruptionBudget():
            version, spec = "policy/v1", _budget_spec(job, policy)
        case NetworkPolicy():
            version, spec = "networking.k8s.io/v1", _network_spec(job, policy)
    meta = metadata(job, policy_name(job.name), labels(job))
    return {"apiVersion": version, "kind": policy.kind, "metadata": meta, "spec": spec}


def _budget_spec(job: Job, budget: DisruptionBudget) -> dict[str, Any]:
    """An eviction must leave `min_available` workers Ready.

    A worker that is not Ready does not train: it may be evicted at any time.
    """
    return {
        "minAvailable": budget.min_available,
        "selector": {"matchLabels": role_selector(job, Role.WORKER)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def _network_spec(job: Job, policy: NetworkPolicy) -> dict[str, Any]:
    """The job's pods accept connections from each other.

    The operator may connect to the store's port, of all pods, because workers do not listen on it. An operator that
    runs in no pod (empty `operator_namespace`) has no labels: then the port is open, and the store's keys protect it.
    """
    pods = {"podSelector": {"matchLabels": {Label.JOB_UID: job.uid}}}
    operators = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: policy.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    store = {"ports": [{"protocol": "TCP", "port": policy.store_port}]}
    return {
        **pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [pods]}, store | ({"from": [operators]} if policy.operator_namespace else {})],
    }


def read_disruption_budget(raw: Raw) -> DisruptionBudget:
    """Return what the operator must know of a PodDisruptionBudget."""
    return DisruptionBudget(text(raw, "metadata", "uid"), integer(raw, "spec", "minAvailable"))


def read_network_policy(raw: Raw) -> NetworkPolicy:
    """Return what the operator must know of a NetworkPolicy."""
    rules = [rule for rule in objects(raw, "spec", "ingress") if objects(rule, "ports")]
    port = next((integer(port, "port") for rule in rules for port in objects(rule, "ports")), 0)
    sources = [source for rule in rules for source in objects(rule, "from")]
    namespace = next((text(s, "namespaceSelector", "matchLabels", _NAMESPACE_NAME) for s in sources), "")
    return NetworkPolicy(text(raw, "metadata", "uid"), port, namespace)
