"""A pod that its kubelet stops: the operator finds the reason in the Events of this pod only."""

from __future__ import annotations

import json

from benchmarks.kube_requests import Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster


def event(pod: Json, name: str, kind: str, reason: str, message: str) -> Json:
    """Return an Event of a kubelet about the trainer of a pod."""
    meta = pod["metadata"]
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{meta['name']}.{name}", "namespace": NAMESPACE},
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "name": meta["name"], "namespace": NAMESPACE, "uid": meta["uid"],
            "fieldPath": "spec.containers{trainer}",
        },
        "type": kind, "reason": reason, "message": message, "source": {"component": "kubelet", "host": "n1"},
        "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z", "count": 1,
    }  # fmt: skip


async def test_the_reason_is_in_the_events_of_the_pod(cluster: Cluster) -> None:
    cluster.operator.start()
    await cluster.apply(cluster.job("probed", 1, 2))
    await cluster.until_running("probed", 2)
    for kind in ("pod/probed-1-0", "elasticjob/probed"):
        shown = cluster.kubectl("get", kind, "-n", NAMESPACE, "-o", "json", "--show-managed-fields")
        managers = {field["manager"] for field in json.loads(shown)["metadata"]["managedFields"]}
        assert "elasticjob-operator" in managers, managers
        assert not any(manager.startswith("OpenAPI") for manager in managers), managers
    node = cluster.pods.node("probed", 1)
    pod, other = cluster.pods.pods[node.pod], cluster.pods.pods["probed-0-0"]
    events = [
        event(pod, "a", "Warning", "Unhealthy", "Liveness probe failed: no answer"),
        event(pod, "b", "Normal", "Killing", "Container trainer failed liveness probe"),
        event(other, "a", "Warning", "FailedPostStartHook", "PostStartHook failed"),
    ]
    cluster.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": events}))
    await cluster.pods.fail(node)

    def failure() -> Json:
        found: Json = cluster.pods.jobs["probed"]["status"].get("lastFailure", {})
        return found

    await cluster.pods.until("the failure is in status", lambda: bool(failure()), 60)
    assert (failure()["reason"], failure()["message"]) == ("Unhealthy", "Liveness probe failed: no answer")
    assert cluster.pods.jobs["probed"]["status"]["restartsCountTowardsMax"] == 1
