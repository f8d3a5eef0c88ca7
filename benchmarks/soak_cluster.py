"""A soak on the real cluster: pods, nodes, links, the store and the operator are taken away."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.goodput import Deed, Step
from benchmarks.stage import NAMESPACE, fresh_namespace, operator_pods, prepare
from cluster import verbs
from support.install import SYSTEM
from support.jobs import Job, digits, kill_worker
from support.kube import is_true
from support.logbook import LogBook

AWAY = 20.0
"""Seconds that a killed or cut-off node is away."""


class ClusterStage:
    """`soak.Stage` on the cluster of `make cluster`."""

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
        self._away: set[str] = set()
        self._doing: dict[str, Callable[[random.Random], str]] = {
            "worker killed": self._worker,
            "pod deleted": self._pod,
            "node killed": self._node_killed,
            "node cut off": self._node_cut,
            "store pod deleted": self._store,
            "operator deleted": self._operator,
            "scale": self._scale,
        }
        self.kinds: Sequence[str] = tuple(self._doing)

    @property
    def book(self) -> LogBook:
        assert self._book is not None
        return self._book

    def start(self, arguments: Sequence[str]) -> None:
        fresh_namespace(self._kube)
        policy = {"minReplicas": 1, "maxReplicas": self._nodes}
        body = digits(self._job.name, str(self._checkpoints), *arguments, elasticPolicy=policy)
        body["spec"]["failurePolicy"] = {"maxRestarts": 10000}
        self._book = LogBook(self._kube, NAMESPACE, self._job.name).__enter__()
        self._kube.create("elasticjobs", body, NAMESPACE)
        self._job.wait("FullyScaled", timeout=180)
        self.book.wait_step(10, timeout=180)

    def steps(self) -> list[Step]:
        """The first rank to say so counts."""
        first: dict[tuple[int, int, str], Step] = {}
        for s in self.book.steps:
            first.setdefault((s.step, s.world, s.pod), Step(s.time, s.step, s.world))
        return list(first.values())

    def do(self, kind: str, rng: random.Random) -> Deed:
        moment = time.time()
        what = self._doing[kind](rng)
        return Deed(moment, kind, what, self._target)

    def over(self) -> bool:
        job = self._job.read()
        return is_true(job, "Complete") or is_true(job, "Failed")

    def finish(self, timeout: float) -> str:
        try:
            self._job.wait("Complete", timeout=timeout)
        except (AssertionError, OSError) as error:
            return str(error)[:500]
        return "Complete"

    def close(self) -> None:
        for node in tuple(self._away):
            verbs.restart(node)
        if self._book is not None:
            self._book.__exit__()
        shutil.rmtree(self._checkpoints, ignore_errors=True)

    # ---- faults

    def _victim(self, rng: random.Random) -> str:
        return rng.choice(self._job.running())

    def _worker(self, rng: random.Random) -> str:
        pod = self._victim(rng)
        kill_worker(self._cluster_dir, self._job, pod)
        return f"in {pod}"

    def _pod(self, rng: random.Random) -> str:
        pod = self._victim(rng)
        self._kube.delete("pods", pod, NAMESPACE)
        return pod

    def _node_killed(self, rng: random.Random) -> str:
        node = self._job.node_of(self._victim(rng))
        self._away.add(node)
        verbs.kill(node)
        time.sleep(AWAY)
        verbs.restart(node)
        self._away.discard(node)
        return f"{node}, back after {AWAY:g} s"

    def _node_cut(self, rng: random.Random) -> str:
        node = self._job.node_of(self._victim(rng))
        verbs.cut(node)
        try:
            time.sleep(AWAY)
        finally:
            verbs.heal(node)
        return f"{node}, healed after {AWAY:g} s"

    def _store(self, _: random.Random) -> str:
        pods = [pod["metadata"]["name"] for pod in self._job.pods(self._job.stores)]
        for pod in pods:
            self._kube.delete("pods", pod, NAMESPACE)
        return ", ".join(pods)

    def _operator(self, _: random.Random) -> str:
        pods = operator_pods(self._kube)
        for pod in pods:
            self._kube.delete("pods", pod, SYSTEM, grace=0)
        return ", ".join(pods)

    def _scale(self, _: random.Random) -> str:
        self._target = self._nodes - 1 if self._target == self._nodes else self._nodes
        self._kube.scale(self._job.name, NAMESPACE, self._target)
        return f"to {self._target}"
