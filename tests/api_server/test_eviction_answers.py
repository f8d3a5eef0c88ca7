"""Evictions on a real API server, which checks each report. Kubernetes has no controller of them: the test is it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from benchmarks.kube_requests import MERGE_PATCH, Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster
from api_server.restricted import restricted_operator
from cluster import build
from elasticjob_operator.model.cluster.evictions import RESPONDER, own_report
from support.cluster.evictions import GROUP, asking_status, eviction_of, finished_status

EVICTIONS = f"/apis/{GROUP}/namespaces/{NAMESPACE}/evictions"
VALUES = ["evictionRequests.enabled=true"]


async def ask(cluster: Cluster, pod: Json) -> str:
    """Create the Eviction of a pod, in which it is the operator's turn, and return its path."""
    assert pod["spec"]["evictionResponders"][0]["name"] == RESPONDER
    await cluster.api.request("POST", EVICTIONS, eviction_of(pod))
    path = f"{EVICTIONS}/{pod['metadata']['name']}"
    await patch(cluster, path, asking_status(pod))
    return path


async def patch(cluster: Cluster, path: str, status: Json) -> None:
    await cluster.api.request("PATCH", f"{path}/status", {"status": status}, MERGE_PATCH)


async def until_reported(cluster: Cluster, field: str) -> Json:
    """Wait until the operator's report in the only Eviction has this field, and return the report."""
    async with asyncio.timeout(60):
        async for _, found in cluster.api.watch(EVICTIONS):
            if field in own_report(found):
                return dict(own_report(found))
    raise AssertionError("the watch has ended")


@pytest.mark.needs_gate("EvictionRequestAPI")
async def test_the_operator_answers_an_eviction_until_another_pod_has_taken_over(cluster: Cluster) -> None:
    async with restricted_operator(cluster, VALUES, "--eviction-requests") as operator:
        operator.begin()
        await cluster.apply(cluster.job("asked", 2, 2))
        await cluster.until_running("asked", 2)
        path = await ask(cluster, cluster.pods.pods["asked-0-0"])
        first = await until_reported(cluster, "heartbeatTime")
        assert first["message"].startswith("asked-0-0 ends as soon as 2 other pods"), first
        await until_reported(cluster, "completionTime")
        assert "asked-0-0" not in cluster.pods.pods, "it is complete once the pod is gone"
        assert "asked-2-0" in cluster.pods.nodes, "another pod runs by then"
        await patch(cluster, path, finished_status(await cluster.api.get(path)))

        def settled() -> bool:
            status = cluster.pods.jobs["asked"]["status"]
            return "cordonSpares" not in status and status.get("worldSize") == status["replicas"] == 2

        await cluster.pods.until("the job has its own pods again", settled, 60)
        status: dict[str, Any] = cluster.pods.jobs["asked"]["status"]
        assert (status["restarts"], status["lastFailure"]["reason"]) == (0, "EvictionRequested")


@pytest.mark.parametrize("release", [build.Release(build.find_release().version)], ids=["without the feature"])
async def test_without_the_api_a_job_runs_as_ever(cluster: Cluster) -> None:
    async with restricted_operator(cluster, VALUES, "--eviction-requests") as operator:
        operator.begin()
        await operator.until_failing("evictions", 1)
        await cluster.apply(cluster.job("plain", 1, 2))
        await cluster.until_running("plain", 2)
        assert "evictionResponders" not in cluster.pods.pods["plain-0-0"]["spec"]
        assert (await operator.ready())[0] == 200
