"""Parts that several manifests use; containers that the operator adds pass Pod Security `restricted`."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.model.cluster.raw import Raw, at

USER_ID = 65532
"""User and group id of the operator's image."""


def security_context(pod: Raw | None = None) -> dict[str, Any]:
    """Return the security context of a container that the operator adds; the template of its pod cannot relax it.

    It names no user or group, because a cluster may assign them from a range of the namespace. Without that, those of
    the `pod` (a pod's spec) hold, else the image's. Only a pod that runs as root needs another user here.
    """
    as_root = pod is not None and at(pod, "securityContext", "runAsUser") == 0
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        **({"runAsUser": USER_ID, "runAsGroup": USER_ID} if as_root else {}),
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


def exclude_nodes(pod: dict[str, Any], avoid: tuple[str, ...]) -> None:
    """Exclude nodes from a pod's affinity, in place.

    The node selector terms of a template are alternatives, so each of them gets the rules.
    """
    # The label kubernetes.io/hostname may differ from the node's name. A rule about the name takes one value only.
    rules = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid]
    affinity = pod["affinity"] = pod.get("affinity") or {}
    node = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    required = node[key] = node.get(key) or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *rules]} for term in terms
    ]
