"""A real API server with the operator as its own process, for tests of what watches, RBAC and admission do to it.

No kubelet and no scheduler: `SimulatedPods` plays them, and each worker is a node of a real store.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.api_server import ApiServer, api_server
from benchmarks.kube_requests import Json, KubeRequests
from benchmarks.operator_process import OperatorProcess
from benchmarks.operator_scale import prepare
from benchmarks.simulated_pods import NAMESPACE, SimulatedPods, jobs_path

from cluster import build
from cluster.layout import Layout
from support.common.ports import free_ports

JOBS = jobs_path(NAMESPACE)


@dataclass(frozen=True)
class Cluster:
    """An API server with the CRD, simulated pods in one namespace, and an operator that is not started yet."""

    server: ApiServer
    api: KubeRequests
    pods: SimulatedPods
    operator: OperatorProcess
    folder: Path
    store_port: int
    """A free port for the stores of its jobs."""

    async def apply(self, job: Json) -> None:
        """Create a job. RequestRefusedError: the API server does not accept it."""
        await self.api.request("POST", jobs_path(job["metadata"]["namespace"]), job)

    def job(self, name: str, minimum: int, maximum: int, namespace: str = NAMESPACE) -> Json:
        """Return the manifest of an elastic job."""
        container = {"name": "trainer", "image": "example.org/train:1", "command": ["python", "train.py"]}
        return {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "elasticPolicy": {"minReplicas": minimum, "maxReplicas": maximum},
                "rendezvous": {"port": self.store_port},
                "template": {"spec": {"containers": [container]}},
            },
        }

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl as the administrator and return its output. CalledProcessError: it failed."""
        kubectl = build.programs(Layout.default()).path("kubectl")
        line: Sequence[str] = [str(kubectl), "--kubeconfig", str(self.server.kubeconfig), *arguments]
        done = subprocess.run(line, input=stdin, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    async def until_running(self, name: str, world: int) -> None:
        """Wait until the status of a job has a round of this many workers."""

        def runs() -> bool:
            status = self.pods.jobs.get(name, {}).get("status", {})
            return bool(status.get("worldSize") == world)

        await self.pods.until(f"{name} runs with {world} workers", runs, 60)


@pytest.fixture
def release() -> build.Release:
    """The Kubernetes that the cluster runs; a test may give it other features."""
    return build.find_release()


@pytest.fixture
async def cluster(tmp_path: Path, release: build.Release) -> AsyncIterator[Cluster]:
    """Yield a cluster; its operator is stopped at the end, and its log printed."""
    with api_server(tmp_path, release) as server:
        async with KubeRequests(server) as api:
            master = await prepare(api)
            pods, operator = SimulatedPods(api, master), OperatorProcess(server, tmp_path)
            await pods.start()
            try:
                yield Cluster(server, api, pods, operator, tmp_path, free_ports(1)[0])
            finally:
                await operator.stop()
                await pods.close()
                log = tmp_path / operator.log
                if log.exists():
                    print(log.read_text(errors="replace")[-20_000:])
