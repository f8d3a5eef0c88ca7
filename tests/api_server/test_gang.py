"""The PodGroup of Kubernetes, which the operator writes with the permissions that the chart gives it."""

from __future__ import annotations

import json

import pytest
from benchmarks.kube_requests import Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster
from api_server.restricted import restricted_operator

GROUPS = "podgroups.scheduling.k8s.io"
PRIORITY: Json = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "urgent"},
    "value": 100,
}


@pytest.mark.needs_gate("GenericWorkload")
async def test_pods_name_their_group_which_has_their_priority_and_its_number_moves_in_place(cluster: Cluster) -> None:
    def found(kind: str, name: str) -> Json:
        answer: Json = json.loads(cluster.kubectl("get", kind, name, "-n", NAMESPACE, "-o", "json"))
        return answer

    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(PRIORITY))
    job = cluster.job("ganged", 2, 2)
    job["spec"]["gang"] = {"provider": "kubernetes"}
    job["spec"]["template"]["spec"]["priorityClassName"] = "urgent"
    async with restricted_operator(cluster, ["gang.kubernetes=true"]) as operator:
        operator.begin()
        await cluster.apply(job)
        await cluster.until_running("ganged", 2)
        group = found(GROUPS, "ganged")
        assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}
        pod = found("pod", "ganged-0-0")
        assert pod["spec"]["schedulingGroup"] == {"podGroupName": "ganged"}
        assert (group["spec"]["priority"], pod["spec"]["priority"]) == (100, 100)
        smaller = json.dumps({"spec": {"elasticPolicy": {"minReplicas": 1}}})
        cluster.kubectl("patch", "ej", "ganged", "-n", NAMESPACE, "--type=merge", "-p", smaller)
        one = {"gang": {"minCount": 1}}
        resized = lambda: found(GROUPS, "ganged")["spec"]["schedulingPolicy"] == one  # noqa: E731
        await cluster.pods.until("minCount follows minReplicas", resized, 30)
        assert found(GROUPS, "ganged")["metadata"]["uid"] == group["metadata"]["uid"]
