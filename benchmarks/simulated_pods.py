"""Scheduler and kubelets of a cluster without machines: all pods of jobs run in this process.

A pod is bound at once, runs a second or two later, and its status is what a kubelet writes. The container of an
ElasticJob's pod is a `SimulatedStore` or a `SimulatedNode`; that of another operator's pod does nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kube_requests import MERGE_PATCH, Json, KubeRequests, RequestRefusedError
from benchmarks.simulated_job import SimulatedNode, SimulatedStore
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import InRound, Outcome, Termination
from elasticjob._runtime.contract.names import Env, Label, Role
from elasticjob._runtime.store_pod.config import StoreConfig
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.reconcile.keys import JobKeys

NAMESPACE = "bench"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
MACHINES = 100
START_SECONDS = (1.0, 2.0)
"""Shortest and longest time from a pod's creation to its first line of Python."""
RENEW_SECONDS = 10.0
"""A kubelet's."""
FIRST_ADDRESS = ipaddress.IPv4Address("127.16.0.1")
"""Of the pods: each has its own address of the loopback network, and may listen there."""
POLL_SECONDS = 0.05


def jobs_path(namespace: str) -> str:
    return f"/apis/elasticjob.dev/v1alpha1/namespaces/{namespace}/elasticjobs"


@dataclass
class SimulatedPods:
    """All pods of a namespace, and what the watches have delivered. `master`: the operator's master key."""

    api: KubeRequests
    master: bytes
    namespace: str = NAMESPACE
    first_address: ipaddress.IPv4Address = FIRST_ADDRESS
    selector: str = Label.JOB_NAME
    """Labels of the pods."""
    jobs: dict[str, Json] = field(default_factory=dict)
    """By name, as last delivered."""
    created: dict[str, float] = field(default_factory=dict)
    """When the watch delivered each pod but stores first, by name; seconds of the monotonic clock."""
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    """Of worker pods that run, by name."""
    pods: dict[str, Json] = field(default_factory=dict)
    """Pods that exist, by name, as last delivered."""
    _stores: dict[str, dict[int, SimulatedStore]] = field(default_factory=lambda: defaultdict(dict))
    """By the job's UID and incarnation."""
    _ended_jobs: set[str] = field(default_factory=set)
    """UIDs of the jobs whose workers end well."""
    _addresses: int = 0
    _machines: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(1))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _failures: list[BaseException] = field(default_factory=list)

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    async def start(self, *, renew_leases: bool = True) -> None:
        """Begin to watch. `renew_leases`: create the machines' Leases and renew them, which one namespace must do."""
        if renew_leases:
            for machine in range(MACHINES):
                metadata = {"name": f"machine-{machine}", "namespace": "kube-node-lease"}
                lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
                await self.api.request("POST", LEASES, {**lease, "spec": _renewed()})
            self._spawn(self._renew_leases())
        for task in (self._watch_pods(), self._watch_jobs()):
            self._spawn(task)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(store.close() for store in self.stores()))

    def stores(self) -> list[SimulatedStore]:
        """Return the stores that run, standby stores too."""
        return [store for stores in self._stores.values() for store in stores.values()]

    def serving_store(self, job: str) -> SimulatedStore | None:
        """Return the store of a job by name; None if none runs."""
        uid = self.jobs[job]["metadata"]["uid"] if job in self.jobs else ""
        return next((store for store in self._stores.get(uid, {}).values() if _is_active(store)), None)

    def workers(self, jobs: Iterable[str]) -> list[str]:
        """Return the names of all worker pods that these jobs have ever had."""
        wanted = set(jobs)
        return [name for name in self.created if name.rsplit("-", 2)[0] in wanted]

    async def until(self, what: str, check: Callable[[], bool], timeout: float) -> None:
        """Wait until `check` returns True. TimeoutError after `timeout` seconds; the error of a failed simulation."""
        deadline = time.monotonic() + timeout
        while not check():
            if self._failures:
                raise RuntimeError("the simulation failed") from self._failures[0]
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{what}: not within {timeout:g} s")
            await asyncio.sleep(POLL_SECONDS)

    def node(self, job: str, index: int) -> SimulatedNode:
        """Return the node of a job that runs with this index."""
        return next(node for name, node in self.nodes.items() if name.startswith(f"{job}-{index}-"))

    async def fail(self, node: SimulatedNode) -> float:
        """End a worker pod as if its agent had been killed with its workers. Return the time before, monotonic."""
        pod, began = self.pods[node.pod], time.monotonic()
        del self.nodes[node.pod]
        node.leave()
        assert node.round is not None
        message = codec.dumps(InRound(node.round)).decode()
        await self._write_status(pod, ended_status(pod, 137, message))
        return began

    def succeed(self, job: str) -> None:
        """Let all workers of a job end well, those of pods that start later too."""
        self._ended_jobs.add(self.jobs[job]["metadata"]["uid"])
        for pod in self.workers([job]):
            if pod in self.nodes:
                self.nodes[pod].succeed()

    # ---- watches

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _watch_jobs(self) -> None:
        while True:
            try:
                async for kind, job in self.api.watch(jobs_path(self.namespace)):
                    if kind == "DELETED":
                        self.jobs.pop(job["metadata"]["name"], None)
                    else:
                        self.jobs[job["metadata"]["name"]] = job
            except RequestRefusedError as error:
                if error.status not in (404, 429):
                    raise
                self.jobs.clear()  # the definition has been deleted, and may come back
                await asyncio.sleep(POLL_SECONDS)

    async def _watch_pods(self) -> None:
        async for kind, pod in self.api.watch(self.pods_path, self.selector):
            name = pod["metadata"]["name"]
            if kind == "DELETED":
                self.pods.pop(name, None)
                await self._stop(pod)
                continue
            known, self.pods[name] = name in self.pods, pod
            if not known:
                if _role(pod) != Role.STORE.value:
                    self.created[name] = time.monotonic()
                self._spawn(self._run(pod))
            elif "deletionTimestamp" in pod["metadata"]:
                self._spawn(self._delete(pod))

    async def _renew_leases(self) -> None:
        while True:
            for machine in range(MACHINES):
                await asyncio.sleep(RENEW_SECONDS / MACHINES)
                await self.api.request("PATCH", f"{LEASES}/machine-{machine}", {"spec": _renewed()}, MERGE_PATCH)

    # ---- one pod

    async def _run(self, pod: Json) -> None:
        """Bind a pod and start its container. A pod that is deleted meanwhile does not run."""
        name = pod["metadata"]["name"]
        self._machines += 1
        target = {"apiVersion": "v1", "kind": "Node", "name": f"machine-{self._machines % MACHINES}"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        with suppress(RequestRefusedError):
            await self.api.request("POST", f"{self.pods_path}/{name}/binding", binding)
        await asyncio.sleep(self._random.uniform(*START_SECONDS))
        if self._has_gone(pod):
            return
        self._addresses += 1
        address = str(self.first_address + self._addresses)
        if _role(pod) == Role.STORE.value:
            await self._start_store(pod, address)
        await self._write_status(pod, running_status(pod, address))
        if _role(pod) == Role.WORKER.value and not self._has_gone(pod):
            self._start_node(pod, address)

    def _has_gone(self, pod: Json) -> bool:
        """Return whether the pod is being deleted, or has been."""
        present = self.pods.get(pod["metadata"]["name"], {}).get("metadata", {})
        return present.get("uid") != pod["metadata"]["uid"] or "deletionTimestamp" in present

    async def _start_store(self, pod: Json, address: str) -> None:
        uid = pod["metadata"]["labels"][Label.JOB_UID]
        environ = {v["name"]: v["value"] for v in pod["spec"]["containers"][0]["env"] if "value" in v}
        keys = JobKeys(self.master).of_job(uid, int(environ[Env.EXECUTION_ATTEMPT]))
        environ |= {Env.NODE_KEY: keys[NODE_KEY], Env.OPERATOR_KEY: keys[OPERATOR_KEY]}
        store = SimulatedStore(StoreConfig.from_environ(environ), address)
        await store.start()
        self._stores[uid][store.config.incarnation] = store
        if _is_active(store):
            for node in [self.nodes[name] for name in self.nodes if _job_uid(self.pods[name]) == uid]:
                node.join(store.coordinator)

    def _start_node(self, pod: Json, address: str) -> None:
        meta = pod["metadata"]
        index, incarnation = int(meta["labels"][Label.INDEX]), int(meta["labels"][Label.INCARNATION])
        node = SimulatedNode(meta["name"], index, incarnation, address, lambda: self._spawn(self._finish(pod)))
        node.ends = _job_uid(pod) in self._ended_jobs
        self.nodes[node.pod] = node
        for store in self._stores[_job_uid(pod)].values():
            if _is_active(store):
                return node.join(store.coordinator)
        return None

    async def _finish(self, pod: Json) -> None:
        message = codec.dumps(Termination(Outcome.SUCCEEDED, "AllAgentsSucceeded")).decode()
        await self._write_status(pod, ended_status(pod, 0, message))

    async def _delete(self, pod: Json) -> None:
        """Stop the container of a pod that is being deleted, and report its end to the API server."""
        await self._stop(pod)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        with suppress(RequestRefusedError):
            await self.api.request("DELETE", f"{self.pods_path}/{pod['metadata']['name']}", body)

    async def _stop(self, pod: Json) -> None:
        labels = pod["metadata"]["labels"]
        if _role(pod) == Role.STORE.value:
            store = self._stores[_job_uid(pod)].pop(int(labels[Label.INCARNATION]), None)
            if store is not None:
                await store.close()
        elif (node := self.nodes.pop(pod["metadata"]["name"], None)) is not None:
            node.leave()

    async def _write_status(self, pod: Json, status: Json) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        body = {"metadata": {"uid": uid}, "status": status}
        try:
            await self.api.request("PATCH", f"{self.pods_path}/{name}/status", body, MERGE_PATCH)
        except RequestRefusedError as error:
            if error.status not in (404, 409):  # it has been deleted meanwhile
                raise


def running_status(pod: Json, address: str) -> Json:
    """Return the status of a pod whose containers run."""
    now = _stamp()
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": _conditions(True, now),
        "containerStatuses": _containers(pod, {"running": {"startedAt": now}}),
    }


def ended_status(pod: Json, exit_code: int, message: str) -> Json:
    """Return the status of a pod whose containers have ended. `message`: the termination message."""
    now, good = _stamp(), exit_code == 0
    ended = {
        "exitCode": exit_code,
        "reason": "Completed" if good else "Error",
        "message": message,
        "startedAt": pod["metadata"]["creationTimestamp"],
        "finishedAt": now,
    }
    return {
        "phase": "Succeeded" if good else "Failed",
        "conditions": _conditions(False, now),
        "containerStatuses": _containers(pod, {"terminated": ended}),
    }


def _conditions(ready: bool, now: str) -> list[Json]:
    values = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    return [{"type": name, "status": str(value), "lastTransitionTime": now} for name, value in values.items()]


def _containers(pod: Json, state: Json) -> list[Json]:
    ready = "running" in state
    common = {"imageID": "simulated", "ready": ready, "started": ready, "restartCount": 0, "state": state}
    return [{"name": c["name"], "image": c["image"], **common} for c in pod["spec"]["containers"]]


def _is_active(store: SimulatedStore) -> bool:
    return not store.coordinator.state.passive


def _role(pod: Json) -> str:
    """Return the role of an ElasticJob's pod; empty for another operator's."""
    return str(pod["metadata"]["labels"].get(Label.ROLE, ""))


def _job_uid(pod: Json) -> str:
    return str(pod["metadata"]["labels"][Label.JOB_UID])


def _renewed() -> Json:
    return {"leaseDurationSeconds": 40, "renewTime": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())}


def _stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
