"""`make demo`: a real Kubernetes, one manifest, and everything taken away while it trains."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

import yaml  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.table import Table  # noqa: E402

import picture  # noqa: E402
from cluster import verbs  # noqa: E402
from cluster.kind import docker_answers  # noqa: E402
from local import play as local_play  # noqa: E402
from support.images import build_and_load  # noqa: E402
from support.install import install  # noqa: E402
from support.jobs import Job, kill_worker  # noqa: E402
from support.kube import ApiError, Json, Kube, is_true  # noqa: E402
from support.logbook import LogBook, Step  # noqa: E402
from timeline import Deed, Snapshot, rows  # noqa: E402

NAMESPACE = "demo"
# In a pipe the table would be squeezed into 80 columns.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)


@dataclass
class Show:
    """The job on stage: what is seen of it, and what is done to it."""

    kube: Kube
    cluster_dir: Path
    job: Job
    book: LogBook
    deeds: list[Deed] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def watch(self) -> None:
        """Remember every status, until the process ends."""
        while True:
            try:
                for _, seen in self.kube.watch("elasticjobs", NAMESPACE, name=self.job.name, timeout=3600):
                    self.snapshots.append(Snapshot(time.time(), seen.get("status", {})))
            except (OSError, ApiError, ValueError):
                time.sleep(0.5)

    def do(self, what: str, deed: Callable[[], object], *, world: int, steps: int = 25) -> None:
        """Do it, wait until a new world of this size trains, and let it go on for some steps."""
        before = self.job.status()["rendezvousRound"]
        self.deeds.append(Deed(time.time(), what, world))
        console.print(f"[bold red]>>>[/] {what}")
        deed()
        status = self.job.wait_world(world, after=before, timeout=180)
        formed = datetime.fromisoformat(status["lastRendezvousTime"]).timestamp()
        after = self.book.wait_steps_after(formed, world=world, timeout=60)
        self.book.wait_step(after.step + steps, timeout=180)

    def table(self) -> Table:
        """The live view."""
        status = self.snapshots[-1].status if self.snapshots else {}
        steps = self.book.steps[-1:]
        grid = Table.grid(padding=(0, 2))
        last = f"step {steps[0].step}  loss {steps[0].loss:.3f}" if steps else "no step yet"
        grid.add_row(
            f"[bold]{self.job.name}[/]", str(status.get("phase", "")), f"{status.get('active', 0)} nodes",
            f"world {status.get('worldSize', 0)}", f"round {status.get('rendezvousRound', 0)}",
            f"restarts {status.get('restarts', 0)}", last,
        )  # fmt: skip
        return grid


def act(show: Show) -> None:
    """The faults, in order; each waits until training has gone on at full size."""
    job = show.job
    size = int(job.status()["worldSize"])
    victim = job.running()[1]
    show.do(f"SIGKILL a worker process in {victim}", lambda: kill_worker(show.cluster_dir, job, victim), world=size)
    victim = job.running()[0]
    show.do(f"kubectl delete pod {victim}", lambda: job.kube.delete("pods", victim, NAMESPACE), world=size)
    node = job.node_of(job.running()[-1])
    show.do(f"kill {node} (kubelet, containers, all)", lambda: verbs.kill(node), world=size)
    console.print(f"    bring {node} back")
    verbs.restart(node)
    show.do("kubectl scale --replicas=4", lambda: job.kube.scale(job.name, NAMESPACE, 4), world=4)
    show.do("kubectl scale --replicas=2", lambda: job.kube.scale(job.name, NAMESPACE, 2), world=2)


def prepare() -> tuple[Kube, Path]:
    """Cluster, images, operator; the namespace is fresh."""
    cluster_dir = verbs.up().parent
    build_and_load()
    kube = Kube(cluster_dir / "kubeconfig")
    console.print("[bold]helm upgrade --install elasticjob charts/elasticjob[/]")
    install(kube, cluster_dir)
    if kube.find("namespaces", NAMESPACE):
        kube.delete("namespaces", NAMESPACE)
        while kube.find("namespaces", NAMESPACE):
            next((k for k, _ in kube.watch("namespaces", None, name=NAMESPACE, timeout=60) if k == "DELETED"), None)
    kube.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    return kube, cluster_dir


def start(kube: Kube, cluster_dir: Path, manifest: Path) -> Show:
    """Apply the manifest and begin to watch."""
    body: Json = yaml.safe_load(manifest.read_text())
    clean_checkpoints(body)
    console.print(f"[bold]kubectl apply -f {manifest.relative_to(ROOT)}[/]")
    job = Job(kube, NAMESPACE, body["metadata"]["name"])
    show = Show(kube, cluster_dir, job, LogBook(kube, NAMESPACE, job.name).__enter__())
    show.deeds.append(Deed(time.time(), f"kubectl apply -f {manifest.relative_to(ROOT)}", body["spec"]["replicas"]))
    kube.create("elasticjobs", body, NAMESPACE)
    threading.Thread(target=show.watch, daemon=True).start()
    return show


def clean_checkpoints(body: Json) -> None:
    """A demo starts from step 0: the checkpoints of an earlier one go."""
    for volume in body["spec"]["template"]["spec"].get("volumes", []):
        directory = Path(volume.get("hostPath", {}).get("path", "/nonexistent"))
        if directory.name.startswith("elasticjob-") and directory.is_dir():
            for checkpoint in directory.glob("*"):
                checkpoint.unlink()


def report(deeds: list[Deed], steps: list[Step], snapshots: list[Snapshot], folder: Path) -> None:
    """The timeline on screen, as JSON, and as a picture."""
    told = rows(deeds, steps, snapshots)
    table = Table(title="What happened, what the status said, how long until the next training step")
    for column in ("", "deed", "next step", "stood still", "full size", "status said"):
        table.add_column(column, overflow="fold")
    for number, row in enumerate(told, 1):
        table.add_row(
            str(number), row.deed.what, _seconds(row.next_step), _seconds(row.standstill),
            _seconds(row.full_size), "\n".join(row.said),
        )  # fmt: skip
    console.print(table)
    folder.mkdir(exist_ok=True)
    (folder / "timeline.json").write_text(json.dumps([asdict(r) for r in told], indent=1))
    picture.draw(folder / "loss.png", steps, told)
    console.print(f"picture: {folder / 'loss.png'}   figures: {folder / 'timeline.json'}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def play(show: Show) -> None:
    """Wait for the first steps, do the deeds, wait for the end; the live view stays on screen meanwhile."""
    with Live(get_renderable=show.table, console=console, refresh_per_second=4, transient=True):
        first = show.book.wait_steps_after(show.deeds[0].time, timeout=180)
        console.print(f"first training step {first.time - show.deeds[0].time:.1f} s after apply")
        show.job.wait("FullyScaled", timeout=60)
        show.book.wait_step(first.step + 25, timeout=120)
        act(show)
        console.print("[bold]kubectl wait --for=condition=Complete[/]")
        show.job.wait("Complete", timeout=300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples/digits.yaml", help="the job to play with")
    parser.add_argument("--local", action="store_true", help="without a cluster: processes of this machine")
    options = parser.parse_args()
    local = options.local
    if not local and os.geteuid() != 0 and not docker_answers():
        console.print("[bold]no root and no Docker here, so no cluster: the same job as processes of this machine[/]")
        local = True
    return without_cluster(options.manifest) if local else on_cluster(options.manifest)


def without_cluster(manifest: Path) -> int:
    begin = time.monotonic()
    stage, code = asyncio.run(local_play(manifest, console))
    report(stage.deeds, stage.steps, stage.snapshots, ROOT / ".demo")
    console.print(f"[bold]{'Complete' if code == 0 else 'not complete'}[/] after {time.monotonic() - begin:.0f} s")
    return code


def on_cluster(manifest: Path) -> int:
    begin = time.monotonic()
    kube, cluster_dir = prepare()
    show = start(kube, cluster_dir, manifest.resolve())
    play(show)
    report(show.deeds, show.book.steps, show.snapshots, ROOT / ".demo")
    final = show.job.read()
    took = time.monotonic() - begin
    console.print(f"[bold green]Complete[/] after {took:.0f} s; restarts counted: {final['status'].get('restarts')}")
    console.print(f"look around: KUBECONFIG={cluster_dir}/kubeconfig {cluster_dir}/bin/kubectl -n {NAMESPACE} get ej")
    return 0 if is_true(final, "Complete") else 1


if __name__ == "__main__":
    sys.exit(main())
