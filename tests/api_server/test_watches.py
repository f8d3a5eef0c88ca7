"""Permissions, namespaces and definitions that are taken away under running jobs, and come back."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Callable

import pytest
import yaml
from benchmarks.kube_requests import DEFINITIONS, Json
from benchmarks.operator_scale import CRD
from benchmarks.simulated_pods import NAMESPACE, SimulatedPods, jobs_path

from api_server.conftest import Cluster
from api_server.restricted import RestrictedOperator, restricted_operator

OTHER = "other"
BOTH = f"watchNamespaces={{{NAMESPACE},{OTHER}}}"
WORKLOADS = "workloads.kueue.x-k8s.io"
DEFINITION: Json = yaml.safe_load(CRD.read_text())


@pytest.fixture
async def others(cluster: Cluster) -> AsyncIterator[SimulatedPods]:
    """The pods of a second tenant."""
    await cluster.api.create_namespace(OTHER)
    pods = SimulatedPods(cluster.api, cluster.pods.master, OTHER, ipaddress.IPv4Address("127.17.0.1"))
    await pods.start(renew_leases=False)
    yield pods
    await pods.close()


async def until(pods: SimulatedPods, name: str, what: str, holds: Callable[[Json], bool]) -> None:
    """Wait until this holds of a job's status."""
    await pods.until(f"{name}: {what}", lambda: holds(pods.jobs.get(name, {}).get("status", {})), 90)


async def until_running(pods: SimulatedPods, name: str, world: int, restarts: int = 0) -> None:
    def runs(status: Json) -> bool:
        return status.get("worldSize") == world and status.get("restarts", 0) == restarts

    await until(pods, name, f"{world} workers after {restarts} restarts", runs)


async def kubectl(cluster: Cluster, *arguments: str, stdin: str = "") -> None:
    """Run kubectl in a thread: the proxy goes on meanwhile."""
    await asyncio.to_thread(cluster.kubectl, *arguments, stdin=stdin)


def two_of(job: Json) -> Json:
    """Return the manifest of the job with two workers."""
    return {**job, "spec": {**job["spec"], "replicas": 2}}


async def scale(cluster: Cluster, name: str, namespace: str, replicas: int) -> None:
    await kubectl(cluster, "scale", "ej", name, "-n", namespace, f"--replicas={replicas}")


async def test_a_tenant_without_permissions_or_with_errors_of_the_server_stops_no_other_tenant(
    cluster: Cluster, others: SimulatedPods
) -> None:
    async with restricted_operator(cluster, [BOTH], f"--watch-namespaces={NAMESPACE},{OTHER}") as operator:
        operator.begin()
        await cluster.apply(two_of(cluster.job("one", 1, 4)))
        await cluster.apply(cluster.job("two", 1, 2, OTHER))
        await until_running(cluster.pods, "one", 2)
        await until_running(others, "two", 2)

        await kubectl(cluster, "delete", "rolebinding", "--all", "-n", OTHER)
        operator.proxy.cut()
        await operator.until_failing("pods", 1)
        await operator.until_failing("elasticjobs", 1)
        assert f"the watch on pods in namespace {OTHER} fails and is tried again until it works" in operator.log_text()
        assert (await operator.ready())[0] == 200, "another tenant's RoleBinding"
        await others.fail(others.node("two", 1))
        await scale(cluster, "one", NAMESPACE, 3)
        await until_running(cluster.pods, "one", 3)
        await cluster.pods.fail(cluster.pods.node("one", 1))
        await until_running(cluster.pods, "one", 3, restarts=1)

        await kubectl(cluster, "apply", "-f", "-", stdin=operator.rules)
        await operator.until_failing("pods", 0)
        await operator.until_failing("elasticjobs", 0)
        await until_running(others, "two", 2, restarts=1)

        operator.proxy.errors[f"/namespaces/{OTHER}/pods"] = 500
        operator.proxy.cut()
        await operator.until_failing("pods", 1)
        await scale(cluster, "one", NAMESPACE, 4)
        await until_running(cluster.pods, "one", 4, restarts=1)
        await others.fail(others.node("two", 1))
        operator.proxy.errors.clear()
        await operator.until_failing("pods", 0)
        await until_running(others, "two", 2, restarts=2)
        assert "works again after" in operator.log_text()


async def test_a_tenants_namespace_that_is_deleted_and_made_again(cluster: Cluster, others: SimulatedPods) -> None:
    async with restricted_operator(cluster, [BOTH], f"--watch-namespaces={NAMESPACE},{OTHER}") as operator:
        operator.begin()
        await cluster.apply(two_of(cluster.job("one", 1, 3)))
        await cluster.apply(cluster.job("two", 1, 2, OTHER))
        await until_running(cluster.pods, "one", 2)
        await until_running(others, "two", 2)

        await delete_namespace(cluster, OTHER)
        operator.proxy.cut()
        await operator.until_failing("pods", 1)
        await scale(cluster, "one", NAMESPACE, 3)
        await until_running(cluster.pods, "one", 3)

        await cluster.api.create_namespace(OTHER)
        await kubectl(cluster, "apply", "-f", "-", stdin=operator.rules)
        await cluster.apply(cluster.job("two", 1, 2, OTHER))
        await operator.until_failing("pods", 0)
        await until_running(others, "two", 2)


async def delete_namespace(cluster: Cluster, name: str) -> None:
    """Delete a namespace with all that is in it, as the namespace controller does."""
    await kubectl(cluster, "delete", "namespace", name, "--wait=false")
    kinds = "ej,rolebindings,services,secrets,networkpolicies,poddisruptionbudgets,serviceaccounts"
    await kubectl(cluster, "delete", kinds, "--all", "-n", name)
    await kubectl(cluster, "delete", "pods", "--all", "-n", name, "--grace-period=0", "--force")
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}, "spec": {"finalizers": []}}
    await cluster.api.request("PUT", f"/api/v1/namespaces/{name}/finalize", body)


async def test_definitions_that_are_deleted_and_made_again(cluster: Cluster) -> None:
    """Kueue's are not there at first, and the jobs have no queue."""
    async with restricted_operator(cluster, ["kueue.enabled=true"], "--kueue") as operator:
        operator.begin()
        await cluster.apply(two_of(cluster.job("one", 1, 4)))
        await until_running(cluster.pods, "one", 2)
        await operator.until_failing("workloads", 1)
        await define_workloads(cluster)
        await operator.until_failing("workloads", 0)
        await kubectl(cluster, "delete", "crd", WORKLOADS)
        await operator.until_failing("workloads", 1)
        await scale(cluster, "one", NAMESPACE, 3)
        await until_running(cluster.pods, "one", 3)
        await define_workloads(cluster)
        await operator.until_failing("workloads", 0)

        await change_definition(cluster, operator)
        await cluster.apply(cluster.job("two", 1, 2))
        await until_running(cluster.pods, "two", 2)
        await cluster.pods.fail(cluster.pods.node("two", 1))
        await until_running(cluster.pods, "two", 2, restarts=1)


async def change_definition(cluster: Cluster, operator: RestrictedOperator) -> None:
    """Delete the definition of ElasticJobs, and make it again once the operator has noticed."""
    await kubectl(cluster, "delete", "crd", "elasticjobs.elasticjob.dev")
    await operator.until_failing("elasticjobs", 1)
    await kubectl(cluster, "delete", "pods", "--all", "-n", NAMESPACE, "--grace-period=0", "--force")
    await cluster.api.define(DEFINITION, jobs_path(NAMESPACE))
    await operator.until_failing("elasticjobs", 0)


async def define_workloads(cluster: Cluster) -> None:
    """Define Kueue's Workloads, without their schema."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # Without the annotation, the API server refuses a definition in a group of Kubernetes' own.
        "metadata": {"name": WORKLOADS, "annotations": {"api-approved.kubernetes.io": "https://example.org"}},
        "spec": {
            "group": "kueue.x-k8s.io",
            "scope": "Namespaced",
            "names": {"plural": "workloads", "singular": "workload", "kind": "Workload", "listKind": "WorkloadList"},
            "versions": [version],
        },
    }
    await cluster.api.request("POST", DEFINITIONS, json.loads(json.dumps(definition)))
