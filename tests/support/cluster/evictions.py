"""What the controller of Evictions writes. Kubernetes 1.37 has the API and none that works, so tests play it."""

from __future__ import annotations

import time
from typing import Any

Json = dict[str, Any]
GROUP = "lifecycle.k8s.io/v1alpha1"
LAST = "imperative-eviction.k8s.io/evictor"
"""Kubernetes' own responder, which has its turn after all others."""


def eviction_of(pod: Json) -> Json:
    """Return the Eviction of a pod, with the pod's name, to be created. Its status follows (`asking_status`)."""
    meta = pod["metadata"]
    target = {"pod": {"name": meta["name"], "uid": meta["uid"]}}
    metadata = {"name": meta["name"], "namespace": meta["namespace"]}
    return {"apiVersion": GROUP, "kind": "Eviction", "metadata": metadata, "spec": {"target": target}}


def asking_status(pod: Json) -> Json:
    """Return the status by which the first responder of this pod has its turn."""
    (responder,) = pod["spec"]["evictionResponders"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "requesters": [{"name": "example.org/upgrade", "intent": "Eviction"}],
        "targetResponders": [
            {**responder, "state": "Active"},
            {"name": LAST, "priority": 100, "state": "Inactive"},
        ],
        "responders": [{"name": responder["name"], "startTime": now}, {"name": LAST}],
    }


def finished_status(eviction: Json) -> Json:
    """Return what changes in the status once the pod is gone. The API server checks that the responder is done."""
    own, last = eviction["status"]["targetResponders"]
    evicted = {
        "type": "TargetEvicted", "status": "True", "reason": "PodDeleted", "message": "",
        "lastTransitionTime": eviction["metadata"]["creationTimestamp"],
    }  # fmt: skip
    return {"targetResponders": [{**own, "state": "Completed"}, last], "conditions": [evicted]}
