"""`make bench-cluster`: what takes seconds of a user's time on a real Kubernetes, from the API call to the next step.

One job a sample; its faults follow each other, each once the job is back at full size.
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
from benchmarks.row import OURS, Row, Sample
from benchmarks.run import end_in_order, keep, tell
from benchmarks.stage import NAMESPACE, fresh_namespace, operator_pods, prepare
from cluster import verbs
from support.install import SYSTEM
from support.jobs import Job, digits, kill_worker
from support.kube import Json, Kube
from support.logbook import LogBook, Step

NODES = 3
SETTLE = 20
"""Steps between one fault and the next."""
WATCH = 10.0
"""Seconds in which something that training should not notice is watched."""


@dataclass
class Trial:
    """One job on the cluster; each deed gives the figures of one or more rows."""

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
        return self._broken(lambda: kill_worker(self.cluster_dir, self.job, pod), "worker-killed")

    def pod_deleted(self) -> dict[str, float]:
        pod = self.job.running()[1]
        return self._broken(lambda: self.kube.delete("pods", pod, NAMESPACE), "pod-deleted")

    def node_killed(self) -> dict[str, float]:
        return self._node_killed(self._node(with_store=False), "node-killed")

    def store_node_killed(self) -> dict[str, float]:
        return self._node_killed(self._node(with_store=True), "store-node-killed")

    def node_cut(self) -> dict[str, float]:
        return self._node_cut(self._node(with_store=False), "node-cut")

    def store_node_cut(self) -> dict[str, float]:
        return self._node_cut(self._node(with_store=True), "store-node-cut")

    def spare(self) -> dict[str, float]:
        """A pod deleted while a spare stands by."""
        self.kube.patch("elasticjobs", self.job.name, {"spec": {"elasticPolicy": {"spares": 1}}}, NAMESPACE)
        self.job.wait_status(worldSize=NODES, standby=1, ready=NODES + 1, timeout=120)
        pod = self.job.running()[1]
        return self._broken(lambda: self.kube.delete("pods", pod, NAMESPACE), "spare")

    def store_deleted(self) -> dict[str, float]:
        pods = [pod["metadata"]["name"] for pod in self._stores()]
        return self._unnoticed(pods, NAMESPACE, "store-deleted")

    def operator_deleted(self) -> dict[str, float]:
        return self._unnoticed(operator_pods(self.kube), SYSTEM, "operator-deleted")

    def scaled_up(self) -> dict[str, float]:
        return self._scaled(NODES + 1, "scale-up")

    def scaled_down(self) -> dict[str, float]:
        return self._scaled(NODES, "scale-down")

    # ---- how each kind is measured

    def _stores(self) -> list[Json]:
        return self.job.pods(self.job.stores)

    def _node(self, *, with_store: bool) -> str:
        """A node with one worker (two lost at once would be fewer than the job needs), with or without its store."""
        stores = {pod["spec"]["nodeName"] for pod in self._stores()}
        nodes = [self.job.node_of(pod) for pod in self.job.running()]
        return next(node for node in nodes if (node in stores) is with_store and nodes.count(node) == 1)

    def _node_killed(self, node: str, name: str) -> dict[str, float]:
        try:
            return self._broken(lambda: verbs.kill(node), name)
        finally:
            verbs.restart(node)

    def _node_cut(self, node: str, name: str) -> dict[str, float]:
        try:
            return self._broken(lambda: verbs.cut(node), name)
        finally:
            verbs.heal(node)

    def _broken(self, deed: Callable[[], object], name: str) -> dict[str, float]:
        """Until the first step of the next round, and until the first at full size."""
        before = self._ready(NODES)
        began = time.time()
        done = deed()
        moment = done if isinstance(done, float) else began  # kubectl exec takes longer than what is measured
        found = self._next_world(before, moment)
        first, full = found[0], next(s for s in found if s.world == NODES)
        return {name: first.time - moment, f"{name}-full": full.time - moment}

    def _scaled(self, nodes: int, name: str) -> dict[str, float]:
        """How long nobody steps, and until the first step at the new size."""
        self._ready(int(self.job.status()["worldSize"]))
        moment = time.time()
        self.kube.scale(self.job.name, NAMESPACE, nodes)
        full = self.book.wait_steps_after(moment, world=nodes, timeout=180)
        times = sorted(s.time for s in self.book.steps if s.time > moment - 1)
        pause = max(b - a for a, b in pairwise(times) if a <= full.time)
        return {name: pause, f"{name}-full": full.time - moment}

    def _unnoticed(self, pods: Sequence[str], namespace: str, name: str) -> dict[str, float]:
        """The longest pause between two steps in the seconds after these pods go; a restart is an error."""
        before = self._ready(NODES)
        moment = time.time()
        for pod in pods:
            self.kube.delete("pods", pod, namespace, grace=0)
        self.book.wait_steps_after(moment + WATCH, timeout=WATCH + 30)
        status = self.job.wait("RendezvousReady", timeout=60)["status"]
        if int(status.get("restarts", 0)) != before.restarts:
            raise AssertionError(f"{name}: the job restarted")
        times = sorted(s.time for s in self.book.steps if moment - 1 < s.time < moment + WATCH)
        return {name: max(b - a for a, b in pairwise(times))}

    def _ready(self, world: int) -> _Before:
        """Trains at this size and has for some steps."""
        self.job.wait_status(worldSize=world, timeout=180)
        self.job.wait("RendezvousReady", timeout=60)
        now = self.book.wait_steps_after(time.time(), world=world, timeout=60)
        self.book.wait_step(now.step + SETTLE, timeout=60)
        status = self.job.status()
        return _Before(int(status["rendezvousRound"]), int(status.get("restarts", 0)))

    def _next_world(self, before: _Before, moment: float) -> list[Step]:
        """Steps of every world after that one, once one is at full size."""
        self.job.wait_world(NODES, after=before.round, timeout=180)
        # A worker's first step comes after it has read the checkpoint, and says so.
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


DEEDS: dict[str, Callable[[Trial], dict[str, float]]] = {
    "apply": Trial.apply,
    "worker-killed": Trial.worker_killed,
    "pod-deleted": Trial.pod_deleted,
    "store-deleted": Trial.store_deleted,
    "scale-up": Trial.scaled_up,
    "scale-down": Trial.scaled_down,
    "node-killed": Trial.node_killed,
    "node-cut": Trial.node_cut,
    "store-node-killed": Trial.store_node_killed,
    "store-node-cut": Trial.store_node_cut,
    "operator-deleted": Trial.operator_deleted,
    "spare": Trial.spare,
}
WANTED: dict[str, tuple[str, float | None]] = {
    "apply": ("apply until the first step (must reach: floor + 3 s)", None),
    "worker-killed": ("worker killed: first step", 0.5),
    "worker-killed-full": ("worker killed: full size", 0.5),
    "pod-deleted": ("pod deleted: first step", 0.7),
    "pod-deleted-full": ("pod deleted: full size (must reach: floor + 3 s)", None),
    "store-deleted": ("store pod deleted: longest pause between steps", 0.3),
    "scale-up": ("scale 3 → 4: standstill", 0.3),
    "scale-up-full": ("scale 3 → 4: full size (must reach: floor + 3 s)", None),
    "scale-down": ("scale 4 → 3: standstill", 0.5),
    "scale-down-full": ("scale 4 → 3: first step of the smaller world", None),
    "node-killed": ("node killed: first step", 1.0),
    "node-killed-full": ("node killed: full size (must reach: floor + 4 s)", None),
    "node-cut": ("node cut off: first step", 3.5),
    "node-cut-full": ("node cut off: full size", None),
    "store-node-killed": ("node killed that has the store: first step", 1.0),
    "store-node-killed-full": ("node killed that has the store: full size (must reach: floor + 4 s)", None),
    "store-node-cut": ("node cut off that has the store: first step", 3.5),
    "store-node-cut-full": ("node cut off that has the store: full size", None),
    "spare": ("pod deleted, a spare stands by: first step", 0.7),
    "spare-full": ("pod deleted, a spare stands by: full size", 1.0),
    "operator-deleted": ("operator deleted: longest pause between steps", 0.3),
}
"""Rows: title, and seconds that ours must reach."""


def trial(kube: Kube, cluster_dir: Path, deeds: list[str]) -> dict[str, Sample]:
    """One job from apply on; a deed that fails is a sample without a value, and ends the trial."""
    fresh_namespace(kube)
    directory = Path(tempfile.mkdtemp(prefix="elasticjob-bench-"))
    directory.chmod(0o777)  # every node of the cluster is this machine
    job = Job(kube, NAMESPACE, "bench")
    found: dict[str, Sample] = {}
    try:
        with LogBook(kube, NAMESPACE, job.name) as book:
            stage = Trial(kube, cluster_dir, job, book, directory)
            for name in deeds:
                try:
                    figures = DEEDS[name](stage)
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
    end_in_order()
    deeds = ["apply", *(d for d in DEEDS if d != "apply" and (not options.rows or d in options.rows))]
    what = machine.describe()
    kube, cluster_dir = prepare()
    begin = time.monotonic()
    samples: dict[str, list[Sample]] = {}
    for turn in range(options.repeat):
        print(f"trial {turn + 1} of {options.repeat}", flush=True)
        for name, sample in trial(kube, cluster_dir, deeds).items():
            samples.setdefault(name, []).append(sample)
    imports = [floor(Path())]
    for name, found in samples.items():
        title, want = WANTED[name]
        sides = {OURS: found} | ({"floor (imports of four nodes)": imports} if "floor" in title else {})
        row = Row(f"cluster-{name}", title, "s", want, {}, {}, 0)
        keep(row, sides, what, time.monotonic() - begin, "make bench-cluster")
        print(f"  {title:60} {', '.join(tell(s.value, 's') for s in found)}", flush=True)
    report.write()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_cluster", description=__doc__)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[], help=f"of {', '.join(DEEDS)}")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
