"""60 jobs at once in 10 namespaces: each ends as it would alone, and leaves nothing behind.

Operator, API server and garbage collector are real. The pods are simulated: starting real ones takes minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.api_server import api_server, garbage_collector
from benchmarks.kube_requests import MERGE_PATCH, Json, KubeRequests
from benchmarks.operator_process import OperatorProcess
from benchmarks.operator_scale import prepare
from benchmarks.simulated_pods import FIRST_ADDRESS, SimulatedPods, jobs_path

from elasticjob._runtime.contract.names import Label
from elasticjob._runtime.store.open_files import raise_open_file_limit
from support.cluster.kube import condition, is_true
from support.common.ports import free_ports

NAMESPACES = 10
LIMIT = 120.0
"""Seconds that a step of a job may take, beside all others."""
CHILDREN = (
    "/api/v1/pods",
    "/api/v1/services",
    "/api/v1/secrets",
    "/apis/policy/v1/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/networkpolicies",
)


@dataclass(frozen=True)
class LiveJob:
    """One job on the API server."""

    pods: SimulatedPods
    name: str
    port: int
    number: int
    """Of its namespace."""

    async def apply(self) -> None:
        spec: dict[str, Any] = {"replicas": 2 if self.name == "wide" else 1, "rendezvous": {"port": self.port}}
        if self.name == "wide":
            spec["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 2}
        if self.name == "failed":
            spec["failurePolicy"] = {"maxRestarts": 0}
        container = {"name": "trainer", "image": "example.org/train:1", "command": ["python", "train.py"]}
        spec["template"] = {"spec": {"containers": [container]}}
        body = {"apiVersion": "elasticjob.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": self.name}}
        await self.pods.api.request("POST", jobs_path(self.pods.namespace), {**body, "spec": spec})

    async def delete(self) -> None:
        await self.pods.api.request("DELETE", f"{jobs_path(self.pods.namespace)}/{self.name}")

    async def suspend(self) -> None:
        path = f"{jobs_path(self.pods.namespace)}/{self.name}"
        await self.pods.api.request("PATCH", path, {"spec": {"suspend": True}}, MERGE_PATCH)

    def read(self) -> Json:
        return self.pods.jobs.get(self.name, {})

    def status(self, name: str) -> object:
        return self.read().get("status", {}).get(name, 0)

    def own_pods(self) -> list[Json]:
        """Return the pods of this job and of deleted ones of its name."""
        return [pod for pod in self.pods.pods.values() if pod["metadata"]["labels"][Label.JOB_NAME] == self.name]

    async def leaves_no_pods(self) -> None:
        await self.until("no pods", lambda: not self.own_pods())

    async def until(self, what: str, check: Callable[[], bool]) -> None:
        await self.pods.until(f"{self.pods.namespace}/{self.name}: {what}", check, LIMIT)

    async def trains(self, *, restarts: int = 0, other_than: str = "") -> None:
        """Wait until the job trains at full size after so many restarts. `other_than`: the UID of a deleted job."""

        def check() -> bool:
            job = self.read()
            wanted = (job.get("spec", {}).get("replicas"), restarts)
            new = job.get("metadata", {}).get("uid", other_than) != other_than
            return new and is_true(job, "Running") and (self.status("worldSize"), self.status("restarts")) == wanted

        await self.until(f"trains after {restarts} restarts", check)

    async def ends(self, kind: str, reason: str, restarts: int = 0) -> None:
        """Wait until the job has this condition and none of its pods runs."""
        await self.until(kind, lambda: is_true(self.read(), kind))
        assert condition(self.read(), kind)["reason"] == reason
        assert self.status("restarts") == restarts
        over = ("Succeeded", "Failed")
        await self.until("no pod runs", lambda: all(pod["status"]["phase"] in over for pod in self.own_pods()))


async def succeed(job: LiveJob) -> None:
    await job.trains()
    job.pods.succeed(job.name)
    await job.ends("Complete", "AllAgentsSucceeded")


async def fail(job: LiveJob) -> None:
    await job.trains()
    await job.pods.fail(job.pods.node(job.name, 0))
    await job.ends("Failed", "MaxRestartsExceeded")


async def fail_once(job: LiveJob) -> None:
    await job.trains()
    await job.pods.fail(job.pods.node(job.name, 0))
    await job.trains(restarts=1)
    job.pods.succeed(job.name)
    await job.ends("Complete", "AllAgentsSucceeded", restarts=1)


async def suspend(job: LiveJob) -> None:
    await job.trains()
    await job.suspend()
    await job.ends("Suspended", "SuspendedByUser")
    await job.leaves_no_pods()


async def delete_and_apply_again(job: LiveJob) -> None:
    """Delete the job in another phase in each namespace."""
    phases = (lambda: bool(job.read()), lambda: bool(job.own_pods()), lambda: is_true(job.read(), "Running"))
    await job.until("the phase in which it is deleted", phases[job.number % len(phases)])
    old = job.read()["metadata"]["uid"]
    await job.delete()
    await job.apply()
    await job.trains(other_than=old)
    await succeed(job)


LIVES = {
    "done": succeed,
    "wide": succeed,
    "failed": fail,
    "retried": fail_once,
    "paused": suspend,
    "again": delete_and_apply_again,
}


async def live(api: KubeRequests, crowd: Sequence[SimulatedPods], port: int) -> dict[str, float]:
    """Run all jobs from their creation to their deletion, and return when each step was done, in seconds."""
    began = time.monotonic()
    jobs = [LiveJob(pods, name, port, number) for (number, pods), name in product(enumerate(crowd), LIVES)]
    await asyncio.gather(*(job.apply() for job in jobs))
    times = {"applied": time.monotonic() - began}
    await asyncio.gather(*(LIVES[job.name](job) for job in jobs))
    times["ended"] = time.monotonic() - began
    await asyncio.gather(*(job.delete() for job in jobs))
    await asyncio.gather(*(job.leaves_no_pods() for job in jobs))
    namespaces = {pods.namespace for pods in crowd}
    deadline = time.monotonic() + LIMIT
    while left := await children(api, namespaces):
        assert time.monotonic() < deadline, left
    times["deleted"] = time.monotonic() - began
    return times


async def children(api: KubeRequests, namespaces: set[str]) -> list[str]:
    """Return what exists in these namespaces of the kinds that jobs have."""
    found = [(path, item["metadata"]) for path in CHILDREN for item in (await api.get(path))["items"]]
    return [f"{path}: {meta['namespace']}/{meta['name']}" for path, meta in found if meta["namespace"] in namespaces]


async def run(folder: Path) -> dict[str, float]:
    raise_open_file_limit()
    with api_server(folder) as server, garbage_collector(server, folder):
        async with KubeRequests(server) as api:
            master, (port,) = await prepare(api), free_ports(1)
            operator = OperatorProcess(server, folder)
            crowd = [
                SimulatedPods(api, master, f"many-{number}", FIRST_ADDRESS + (number << 8))
                for number in range(NAMESPACES)
            ]
            operator.start()
            try:
                for pods in crowd:
                    await api.create_namespace(pods.namespace)
                    await pods.start(renew_leases=pods is crowd[0])
                return await live(api, crowd, port)
            finally:
                await operator.stop()
                await asyncio.gather(*(pods.close() for pods in crowd))


def test_60_jobs_in_10_namespaces_end_as_each_would_alone(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    times = asyncio.run(run(tmp_path))
    record_property("seconds", {name: round(seconds, 1) for name, seconds in times.items()})
    print({name: round(seconds, 1) for name, seconds in times.items()})
