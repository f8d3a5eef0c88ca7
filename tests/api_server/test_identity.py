"""The operator says who it is: in `managedFields` of what it writes, and to the API server."""

from __future__ import annotations

from api_server.conftest import JOBS, Cluster
from elasticjob_operator.kube.client import FIELD_MANAGER


async def test_the_operator_is_the_manager_of_what_it_writes(cluster: Cluster) -> None:
    cluster.operator.start()
    await cluster.apply(cluster.job("owned", 1, 2))
    await cluster.until_running("owned", 2)
    job = await cluster.api.get(f"{JOBS}/owned")
    writers = {entry["manager"] for entry in job["metadata"]["managedFields"] if entry.get("subresource") == "status"}
    assert writers == {FIELD_MANAGER}
    assert FIELD_MANAGER not in {e["manager"] for e in job["metadata"]["managedFields"] if "subresource" not in e}
    core, system = "/api/v1/namespaces/bench", "elasticjob-system"
    for path in (
        f"{core}/pods/owned-0-0",
        f"{core}/services/owned",
        f"{core}/secrets/owned-rdzv-{job['status']['keyId']}",
        "/apis/networking.k8s.io/v1/namespaces/bench/networkpolicies/owned",
        "/apis/policy/v1/namespaces/bench/poddisruptionbudgets/owned",
        f"/apis/coordination.k8s.io/v1/namespaces/{system}/leases/elasticjob-operator",
    ):
        fields = (await cluster.api.get(path))["metadata"]["managedFields"]
        assert FIELD_MANAGER in {entry["manager"] for entry in fields}, path
