"""A soak on the test cluster, with faults of workers, pods, nodes, network links, the store and the operator."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.goodput import Fault, Step
from benchmarks.soak_stage import digits_arguments
from benchmarks.stage import NAMESPACE, operator_pods, prepare
from cluster import verbs
from support.cluster.install import SYSTEM
from support.cluster.jobs import Job, digits, kill_worker
from support.cluster.kube import is_true
from support.cluster.logbook import LogBook

DOWNTIME = 20.0
"""Seconds until a killed node restarts or a cut-off node is connected again."""


class ClusterStage:
    """The `Stage` on the cluster of `make cluster`."""

    name = "cluster"

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._target = nodes
        self._kube, self._cluster_dir = prepare()
        self._job = Job(self._kube, NAMESPACE, "soak")
        # All nodes of the test cluster are this machine.
        self._checkpoints = Path(tempfile.mkdtemp(prefix="elasticjob-soak-"))
        self._checkpoints.chmod(0o777)
        self._book: LogBook | None = None
        self._down: set[str] = set()
        self._faults: dict[str, Callable[[random.Random], str]] = {
            "worker killed": self._kill_worker,
            "pod deleted": self._delete_pod,
            "node killed": self._kill_node,
            "node cut off": self._cut_node,
            "store pod deleted": self._delete_store,
            "operator deleted": self._delete_operator,
            "scale": self._scale,
        }
        self.kinds: Sequence[str] = tuple(self._faults)

    @property
    def book(self) -> LogBook:
        assert self._book is not None
        return self._book

    def start(self, steps: int) -> None:
        self._kube.recreate_namespace(NAMESPACE)
        policy = {"minReplicas": 1, "maxReplicas": self._nodes}
        body = digits(self._job.name, str(self._checkpoints), *digits_arguments(steps), elasticPolicy=policy)
        body["spec"]["failurePolicy"] = {"maxRestarts": 10000}
        # On this cluster several nodes fit on one machine. Without this, its loss may be that of most nodes, or of all.
        labels = dict(label.split("=") for label in self._job.workers.split(","))
        workers = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
        apart = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": workers}]}
        body["spec"]["template"]["spec"]["affinity"] = {"podAntiAffinity": apart}
        self._book = LogBook(self._kube, NAMESPACE, self._job.name).__enter__()
        self._kube.create("elasticjobs", body, NAMESPACE)
        self._job.wait("FullyScaled", timeout=180)
        self.book.wait_step(10, timeout=180)

    def steps(self) -> list[Step]:
        """Return each step of each pod once, with the time of its first line."""
        first: dict[tuple[int, int, str], Step] = {}
        for s in self.book.steps:
            first.setdefault((s.step, s.world, s.pod), Step(s.time, s.step, s.world))
        return list(first.values())

    def inject(self, kind: str, rng: random.Random) -> Fault:
        moment = time.time()
        details = self._faults[kind](rng)
        return Fault(moment, kind, details, self._target)

    def has_ended(self) -> bool:
        job = self._job.read()
        return is_true(job, "Complete") or is_true(job, "Failed")

    def finish(self, timeout: float) -> str:
        try:
            self._job.wait("Complete", timeout=timeout)
        except (AssertionError, OSError) as error:
            return str(error)[:500]
        return "Complete"

    def close(self) -> None:
        for node in tuple(self._down):
            verbs.restart(node)
        if self._book is not None:
            self._book.__exit__()
        shutil.rmtree(self._checkpoints, ignore_errors=True)

    # ---- faults

    def _victim(self, rng: random.Random) -> str:
        return rng.choice(self._job.running())

    def _kill_worker(self, rng: random.Random) -> str:
        pod = self._victim(rng)
        kill_worker(self._cluster_dir, self._job, pod)
        return f"in {pod}"

    def _delete_pod(self, rng: random.Random) -> str:
        pod = self._victim(rng)
        self._kube.delete("pods", pod, NAMESPACE)
        return pod

    def _kill_node(self, rng: random.Random) -> str:
        node = self._job.node_of(self._victim(rng))
        self._down.add(node)
        verbs.kill(node)
        time.sleep(DOWNTIME)
        verbs.restart(node)
        self._down.discard(node)
        return f"{node}, restarted after {DOWNTIME:g} s"

    def _cut_node(self, rng: random.Random) -> str:
        node = self._job.node_of(self._victim(rng))
        verbs.cut(node)
        try:
            time.sleep(DOWNTIME)
        finally:
            verbs.heal(node)
        return f"{node}, connected again after {DOWNTIME:g} s"

    def _delete_store(self, _: random.Random) -> str:
        pod = self._job.serving_store()
        self._kube.delete("pods", pod, NAMESPACE)
        return pod

    def _delete_operator(self, _: random.Random) -> str:
        pods = operator_pods(self._kube)
        for pod in pods:
            self._kube.delete("pods", pod, SYSTEM, grace=0)
        return ", ".join(pods)

    def _scale(self, _: random.Random) -> str:
        self._target = self._nodes - 1 if self._target == self._nodes else self._nodes
        self._kube.scale(self._job.name, NAMESPACE, self._target)
        return f"to {self._target}"
