"""`make bench-cluster`: recovery times on a real Kubernetes cluster, from the API call to the next step.

Each sample is one job. Its faults follow each other: the next one starts once the job is at full size again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import machine, report
from benchmarks.cold_start import floor
from benchmarks.row import OURS, Sample
from benchmarks.run import exit_on_sigterm, format_value, save_cluster_row
from benchmarks.stage import NAMESPACE, operator_pods, prepare
from cluster import verbs
from support.cluster.install import SYSTEM
from support.cluster.jobs import Job, digits, kill_worker
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LogBook, Step

NODES = 3
MOVES = 8
"""How often a row moves the store or a worker to find the machine that it needs."""
SETTLE = 20
"""Steps between one fault and the next."""
WATCH = 10.0
"""Seconds of training watched after a fault that must not disturb it."""


class PlacementError(RuntimeError):
    """The pods are not on the nodes that a row needs: it has no sample then."""


@dataclass
class JobRun:
    """One job on the cluster. Each action returns the figures of one or more rows."""

    kube: Kube
    cluster_dir: Path
    job: Job
    book: LogBook
    directory: Path

    def apply(self) -> dict[str, float]:
        policy = {"minReplicas": 2, "maxReplicas": NODES + 1}
        arguments = ("--epochs", "100000", "--step-delay", "0.05")
        body = digits(self.job.name, str(self.directory), *arguments, replicas=NODES, elasticPolicy=policy)
        moment = time.time()
        self.kube.create("elasticjobs", body, NAMESPACE)
        first = self.book.wait_steps_after(moment, timeout=180)
        return {"apply": first.time - moment}

    def worker_killed(self) -> dict[str, float]:
        pod = self.job.running()[1]
        return self._measure_recovery(lambda: kill_worker(self.cluster_dir, self.job, pod), "worker-killed")

    def pod_deleted(self) -> dict[str, float]:
        pod = self.job.running()[1]
        return self._measure_recovery(lambda: self.kube.delete("pods", pod, NAMESPACE), "pod-deleted")

    def node_killed(self) -> dict[str, float]:
        return self._node_killed(self._node(with_store=False), "node-killed")

    def store_node_killed(self) -> dict[str, float]:
        return self._node_killed(self._node(with_store=True), "store-node-killed")

    def node_cut(self) -> dict[str, float]:
        return self._node_cut(self._node(with_store=False), "node-cut")

    def store_node_cut(self) -> dict[str, float]:
        return self._node_cut(self._node(with_store=True), "store-node-cut")

    def spare(self) -> dict[str, float]:
        """A pod is deleted while a spare is on standby."""
        self.kube.patch("elasticjobs", self.job.name, {"spec": {"elasticPolicy": {"spares": 1}}}, NAMESPACE)
        self.job.wait_status(worldSize=NODES, standby=1, ready=NODES + 1, timeout=120)
        pod = self.job.running()[1]
        return self._measure_recovery(lambda: self.kube.delete("pods", pod, NAMESPACE), "spare")

    def store_deleted(self) -> dict[str, float]:
        pods = [pod["metadata"]["name"] for pod in self._stores()]
        return self._measure_undisturbed(pods, NAMESPACE, "store-deleted")

    def operator_deleted(self) -> dict[str, float]:
        return self._measure_undisturbed(operator_pods(self.kube), SYSTEM, "operator-deleted")

    def scaled_up(self) -> dict[str, float]:
        return self._measure_scaling(NODES + 1, "scale-up")

    def scaled_down(self) -> dict[str, float]:
        return self._measure_scaling(NODES, "scale-down")

    # ---- measurements

    def _stores(self) -> list[Json]:
        """Return the pod of the store, without its standby store."""
        name = self.job.serving_store()
        return [pod for pod in self.job.pods(self.job.stores) if pod["metadata"]["name"] == name]

    def _node(self, *, with_store: bool) -> str:
        """Return a node with one worker, with or without the store. If there is none, move the store or a worker.

        The loss of two workers would leave fewer than the minimum.
        """
        for turn in range(MOVES):
            (store,) = self._stores()
            nodes = [self.job.node_of(pod) for pod in self.job.running()]
            for node in nodes:
                if (node == store["spec"]["nodeName"]) is with_store and nodes.count(node) == 1:
                    return node
            if turn % 2 and len(set(nodes)) < len(nodes):
                self._move_worker()
            else:
                self.job.wait_standby_store(timeout=60)
                self.kube.delete("pods", store["metadata"]["name"], NAMESPACE)
                self.job.wait_store(int(self.job.status()["rendezvous"]["incarnation"]) + 1, timeout=60)
        wanted = "and the" if with_store else "without the"
        raise PlacementError(f"in {MOVES} attempts no node had one worker {wanted} store")

    def _move_worker(self) -> None:
        """Delete a worker of the node that has most of them: its replacement may go to another node."""
        nodes = {pod: self.job.node_of(pod) for pod in self.job.running()}
        crowded = max(nodes, key=lambda pod: list(nodes.values()).count(nodes[pod]))
        before = self._wait_until_steady(NODES)
        self.kube.delete("pods", crowded, NAMESPACE)
        self.job.wait_world(NODES, after=before.round, timeout=180)

    def _node_killed(self, node: str, name: str) -> dict[str, float]:
        try:
            return self._measure_recovery(lambda: verbs.kill(node), name)
        finally:
            verbs.restart(node)

    def _node_cut(self, node: str, name: str) -> dict[str, float]:
        try:
            return self._measure_recovery(lambda: verbs.cut(node), name)
        finally:
            verbs.heal(node)

    def _measure_recovery(self, action: Callable[[], object], name: str) -> dict[str, float]:
        """Run the action. Return the time until the first step of the next round, and until the first at full size."""
        before = self._wait_until_steady(NODES)
        began = time.time()
        result = action()
        # `kill_worker` returns its own time: kubectl exec takes longer than the recovery.
        moment = result if isinstance(result, float) else began
        steps = self._next_world(before, moment)
        first, full = steps[0], next(s for s in steps if s.world == NODES)
        return {name: first.time - moment, f"{name}-full": full.time - moment}

    def _measure_scaling(self, nodes: int, name: str) -> dict[str, float]:
        """Scale the job. Return the pause between steps, and the time until the first step at the new size."""
        self._wait_until_steady(int(self.job.status()["worldSize"]))
        moment = time.time()
        self.kube.scale(self.job.name, NAMESPACE, nodes)
        full = self.book.wait_steps_after(moment, world=nodes, timeout=180)
        times = sorted(s.time for s in self.book.steps if s.time > moment - 1)
        pause = max(b - a for a, b in pairwise(times) if a <= full.time)
        return {name: pause, f"{name}-full": full.time - moment}

    def _measure_undisturbed(self, pods: Sequence[str], namespace: str, name: str) -> dict[str, float]:
        """Delete pods and return the longest pause between two steps afterwards. Raise an error if the job restarts."""
        before = self._wait_until_steady(NODES)
        moment = time.time()
        for pod in pods:
            self.kube.delete("pods", pod, namespace, grace=0)
        self.book.wait_steps_after(moment + WATCH, timeout=WATCH + 30)
        status = self.job.wait("RendezvousReady", timeout=60)["status"]
        if int(status.get("restarts", 0)) != before.restarts:
            raise AssertionError(f"{name}: the job restarted")
        times = sorted(s.time for s in self.book.steps if moment - 1 < s.time < moment + WATCH)
        return {name: max(b - a for a, b in pairwise(times))}

    def _wait_until_steady(self, world: int) -> _Before:
        """Wait until the job has trained some steps at this size beside a standby store, and return its round and
        restarts. After each loss of a store it takes some 2 s until there is a standby store again."""
        self.job.wait_status(worldSize=world, timeout=180)
        self.job.wait("RendezvousReady", timeout=60)
        self.job.wait_standby_store(timeout=60)
        now = self.book.wait_steps_after(time.time(), world=world, timeout=60)
        self.book.wait_step(now.step + SETTLE, timeout=60)
        status = self.job.status()
        return _Before(int(status["rendezvousRound"]), int(status.get("restarts", 0)))

    def _next_world(self, before: _Before, moment: float) -> list[Step]:
        """Wait for a later world at full size and return the steps of all worlds after `before`."""
        self.job.wait_world(NODES, after=before.round, timeout=180)
        # A worker prints "resumed from" before its first step.
        self.book.wait(lambda: bool(self._resumed(moment)), timeout=60, what="a new world")
        begin = self._resumed(moment)[0]
        self.book.wait_steps_after(begin, world=NODES, timeout=60)
        return [s for s in self.book.steps if s.time > begin]

    def _resumed(self, moment: float) -> list[float]:
        return sorted(line.time for line in self.book.lines if line.time > moment and "resumed from" in line.text)


@dataclass(frozen=True)
class _Before:
    round: int
    restarts: int


ACTIONS: dict[str, Callable[[JobRun], dict[str, float]]] = {
    "apply": JobRun.apply,
    "worker-killed": JobRun.worker_killed,
    "pod-deleted": JobRun.pod_deleted,
    "store-deleted": JobRun.store_deleted,
    "scale-up": JobRun.scaled_up,
    "scale-down": JobRun.scaled_down,
    "node-killed": JobRun.node_killed,
    "node-cut": JobRun.node_cut,
    "store-node-killed": JobRun.store_node_killed,
    "store-node-cut": JobRun.store_node_cut,
    "operator-deleted": JobRun.operator_deleted,
    "spare": JobRun.spare,
}
TITLES: dict[str, tuple[str, float | None]] = {
    "apply": ("apply until the first step (must reach: floor + 3 s)", None),
    "worker-killed": ("worker killed: first step", 0.5),
    "worker-killed-full": ("worker killed: full size", 0.5),
    "pod-deleted": ("pod deleted: first step", 0.7),
    "pod-deleted-full": ("pod deleted: full size (must reach: floor + 3 s)", None),
    "store-deleted": ("store pod deleted: longest pause between steps", 0.3),
    "scale-up": ("scale 3 → 4: pause", 0.3),
    "scale-up-full": ("scale 3 → 4: full size (must reach: floor + 3 s)", None),
    "scale-down": ("scale 4 → 3: pause", 0.5),
    "scale-down-full": ("scale 4 → 3: first step of the smaller world", None),
    "node-killed": ("node killed: first step", 1.0),
    "node-killed-full": ("node killed: full size (must reach: floor + 4 s)", None),
    "node-cut": ("node cut off: first step", 3.5),
    "node-cut-full": ("node cut off: full size", None),
    "store-node-killed": ("node of the store killed: first step", 1.0),
    "store-node-killed-full": ("node of the store killed: full size (must reach: floor + 4 s)", None),
    "store-node-cut": ("node of the store cut off: first step", 3.5),
    "store-node-cut-full": ("node of the store cut off: full size", None),
    "spare": ("pod deleted, with a spare: first step", 0.7),
    "spare-full": ("pod deleted, with a spare: full size", 1.0),
    "operator-deleted": ("operator deleted: longest pause between steps", 0.3),
}
"""Title and target (seconds) of each row."""


def run_job(kube: Kube, cluster_dir: Path, actions: list[str]) -> dict[str, Sample]:
    """Run one job with these actions and return a sample for each row.

    An action that fails is a sample without a value and ends the job.
    """
    kube.recreate_namespace(NAMESPACE)
    directory = Path(tempfile.mkdtemp(prefix="elasticjob-bench-"))
    directory.chmod(0o777)  # all nodes of the test cluster share this machine's file system
    job = Job(kube, NAMESPACE, "bench")
    found: dict[str, Sample] = {}
    try:
        with LogBook(kube, NAMESPACE, job.name) as book:
            run = JobRun(kube, cluster_dir, job, book, directory)
            for name in actions:
                figures: dict[str, float] = {}
                try:
                    figures = ACTIONS[name](run)
                except PlacementError as error:
                    print(f"  {name}: {error}", flush=True)
                except Exception as error:
                    found[name] = Sample(None, f"{type(error).__name__}: {error}"[:300])
                    break
                finally:
                    print(f"  {name}: {found.get(name) or figures}", flush=True)
                found |= {row: Sample(value) for row, value in figures.items()}
    finally:
        with suppress(OSError):
            kube.delete("elasticjobs", job.name, NAMESPACE)
        shutil.rmtree(directory, ignore_errors=True)
    return found


def main() -> int:
    options = _options()
    exit_on_sigterm()
    actions = ["apply", *(a for a in ACTIONS if a != "apply" and (not options.rows or a in options.rows))]
    description = machine.describe()
    kube, cluster_dir = prepare()
    begin = time.monotonic()
    samples: dict[str, list[Sample]] = {}
    for turn in range(options.repeat):
        print(f"job {turn + 1} of {options.repeat}", flush=True)
        for name, sample in run_job(kube, cluster_dir, actions).items():
            samples.setdefault(name, []).append(sample)
    imports = [floor(Path())]
    for name, found in samples.items():
        title, target = TITLES[name]
        sides = {OURS: found} | ({"floor (imports of four nodes)": imports} if "floor" in title else {})
        took = time.monotonic() - begin
        save_cluster_row(name, title, target, sides, description, took, "make bench-cluster")
        print(f"  {title:60} {', '.join(format_value(s.value, 's') for s in found)}", flush=True)
    report.write()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_cluster", description=__doc__)
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=[],
        help=f"comma-separated rows (default: all of {', '.join(ACTIONS)})",
    )
    parser.add_argument("--repeat", type=int, default=3, help="number of jobs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
