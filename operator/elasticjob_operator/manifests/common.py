"""What all containers that the operator adds have in common: they pass Pod Security `restricted`."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY

NOBODY = 65532
"""Uid of our own containers."""


def security_context() -> dict[str, Any]:
    """Of a container; a template that runs as root does not change it."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": NOBODY,
        "runAsGroup": NOBODY,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def env(values: dict[str, object]) -> list[dict[str, Any]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def env_from_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    assert key in (NODE_KEY, OPERATOR_KEY)  # noqa: S101
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def env_from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def keep_away(pod: dict[str, Any], avoid: tuple[str, ...]) -> None:
    """Keep a pod off some nodes. Required terms are alternatives: each of the template's must keep away by itself."""
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid)}
    affinity = pod["affinity"] = pod.get("affinity") or {}
    node = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    required = node[key] = node.get(key) or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), rule]} for term in terms
    ]
