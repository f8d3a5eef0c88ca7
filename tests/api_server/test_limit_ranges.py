"""What the API server's admission makes of the requests and limits of a job's pods: QoS class and LimitRanges."""

from __future__ import annotations

import json

from benchmarks.kube_requests import Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster

GUARANTEED = {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
STRICT = {
    "type": "Container", "min": {"cpu": "100m", "memory": "128Mi"}, "max": {"cpu": "8", "memory": "8Gi"},
    "maxLimitRequestRatio": {"cpu": "4", "memory": "2"},
}  # fmt: skip


async def test_guaranteed_pods_and_a_limitrange_that_store_and_workers_fit(cluster: Cluster) -> None:
    limits = {
        "apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "strict", "namespace": NAMESPACE},
        "spec": {"limits": [STRICT]},
    }  # fmt: skip
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(limits))
    cluster.operator.start()

    def job(name: str, **store: Json) -> Json:
        body = cluster.job(name, 1, 2)
        (container,) = body["spec"]["template"]["spec"]["containers"]
        container["resources"] = GUARANTEED
        if store:
            body["spec"]["rendezvous"]["store"] = {"resources": store}
        return body

    await cluster.apply(job("fits"))
    await cluster.until_running("fits", 2)
    pods = json.loads(cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
    qos = {p["metadata"]["name"]: p["status"]["qosClass"] for p in pods}
    assert (qos["fits-0-0"], qos["fits-1-0"]) == ("Guaranteed", "Guaranteed")
    stores = [p["spec"]["containers"][0]["resources"] for p in pods if "-rdzv-" in p["metadata"]["name"]]
    assert stores
    for resources in stores:
        assert resources["requests"] == {"cpu": "125m", "memory": "256Mi"}
        assert resources["limits"] == {"cpu": "500m", "memory": "512Mi"}

    def running(name: str) -> Json:
        conditions = cluster.pods.jobs.get(name, {}).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == "Running"), {})

    # What the job says itself stays, and the API server's words say what is wrong with it.
    await cluster.apply(job("own-store", requests={"cpu": "20m", "memory": "256Mi"}))
    small, cpu = job("own-trainer"), {"cpu": "20m"}
    small["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": cpu, "limits": cpu}
    await cluster.apply(small)
    for name, field in (("own-store", "rendezvous.store"), ("own-trainer", "the template")):
        says = lambda name=name: "minimum cpu usage per Container is 100m" in running(name).get("message", "")  # noqa: E731
        await cluster.pods.until(f"{name} says what is wrong", says, 60)
        assert running(name)["reason"] == "PodCreationFailed"
        assert f"If {field} is wrong, correct it" in running(name)["message"]
