"""Changes of guarded fields that the operator does not see suspended: no round has pods of two templates."""

from __future__ import annotations

from typing import Any

from benchmarks.kube_requests import MERGE_PATCH

from api_server.conftest import JOBS, Cluster
from elasticjob._runtime.contract.names import Env, Label, Role
from support.common.ports import free_ports


def made_from(cluster: Cluster) -> set[tuple[str, str]]:
    """Return image and port of the store of all worker pods that have not ended, as the API server has them."""
    workers = (p for p in cluster.pods.pods.values() if p["metadata"]["labels"].get(Label.ROLE) == Role.WORKER.value)
    live = [pod for pod in workers if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
    found = set()
    for pod in live:
        (container,) = pod["spec"]["containers"]
        endpoint = next(item["value"] for item in container["env"] if item["name"] == Env.STORE_ENDPOINT)
        found.add((container["image"], endpoint.rpartition(":")[2]))
    return found


async def change_at_once(cluster: Cluster, image: str, port: int) -> None:
    """Suspend the job `one`, change it and resume it, by two requests in a row."""
    job: dict[str, Any] = cluster.job("one", 1, 2)["spec"]
    job["template"]["spec"]["containers"][0]["image"] = image
    change = {"suspend": True, "template": job["template"], "rendezvous": {"port": port}}
    for spec in (change, {"suspend": False}):
        await cluster.api.request("PATCH", f"{JOBS}/one", {"spec": spec}, MERGE_PATCH)


async def until_execution(cluster: Cluster, number: int, image: str, port: int) -> None:
    """Wait until this execution runs, of which all pods are made from these fields; fail if pods of two are live."""
    mixed: list[set[tuple[str, str]]] = []

    def runs() -> bool:
        found, status = made_from(cluster), cluster.pods.jobs["one"].get("status", {})
        mixed.extend([found] if len(found) > 1 else [])
        there = found == {(image, str(port))} and status.get("executionAttempts") == number
        return there and status.get("worldSize") == 2

    await cluster.pods.until(f"execution {number} runs", runs, 90)
    assert mixed == []


async def test_no_round_has_pods_of_two_templates(cluster: Cluster) -> None:
    first, second, third = cluster.store_port, *free_ports(2)
    cluster.operator.start()
    await cluster.apply(cluster.job("one", 1, 2))
    await cluster.until_running("one", 2)
    assert made_from(cluster) == {("example.org/train:1", str(first))}
    # The operator is down while the job is suspended, changed and resumed.
    await cluster.operator.stop()
    await change_at_once(cluster, "example.org/train:2", second)
    cluster.operator.start()
    await until_execution(cluster, 2, "example.org/train:2", second)
    # The operator is up, and may or may not see the first of two requests.
    await change_at_once(cluster, "example.org/train:3", third)
    await until_execution(cluster, 3, "example.org/train:3", third)
    record = cluster.pods.jobs["one"]["status"]["guardedFields"]
    assert (record["execution"], record["digest"][:2]) == (3, "1:")
