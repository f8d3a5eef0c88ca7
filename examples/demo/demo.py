"""`make demo`: train one elastic job on a real Kubernetes cluster while workers, pods and nodes fail."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

import yaml  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

import picture  # noqa: E402
from cluster import verbs  # noqa: E402
from cluster.kind import docker_answers  # noqa: E402
from local import play as local_play  # noqa: E402
from support.images import build_all  # noqa: E402
from support.install import install  # noqa: E402
from support.jobs import Job, kill_worker  # noqa: E402
from support.kube import ApiError, Json, Kube, is_true  # noqa: E402
from support.logbook import LogBook, Step  # noqa: E402
from timeline import Action, Row, Snapshot, rows  # noqa: E402

NAMESPACE = "demo"
console = Console(highlight=False)


@dataclass
class Demo:
    """The job on the cluster: the actions so far and its recorded statuses."""

    kube: Kube
    cluster_dir: Path
    job: Job
    book: LogBook
    actions: list[Action] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def watch(self) -> None:
        """Record every status until the process ends."""
        while True:
            try:
                for _, job in self.kube.watch("elasticjobs", NAMESPACE, name=self.job.name, timeout=3600):
                    self.snapshots.append(Snapshot(time.time(), job.get("status", {})))
            except (OSError, ApiError, ValueError):
                time.sleep(0.5)

    def perform(self, what: str, action: Callable[[], object], *, world: int, steps: int = 25) -> None:
        """Perform the action, then wait until a new world of this size has trained some steps."""
        before = self.job.status()["rendezvousRound"]
        self.actions.append(Action(time.time(), what, world))
        console.print(f"[bold red]>>>[/] {what}")
        action()
        status = self.job.wait_world(world, after=before, timeout=180)
        formed = datetime.fromisoformat(status["lastRendezvousTime"]).timestamp()
        after = self.book.wait_steps_after(formed, world=world, timeout=60)
        self.book.wait_step(after.step + steps, timeout=180)

    def table(self) -> Table:
        """Return the live view of the job."""
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


def act(demo: Demo) -> None:
    """Perform the faults and actions in order. Each one starts once the job trains at full size again."""
    job = demo.job
    size = int(job.status()["worldSize"])
    victim = job.running()[1]
    demo.perform(
        f"SIGKILL a worker process in {victim}", lambda: kill_worker(demo.cluster_dir, job, victim), world=size
    )
    victim = job.running()[0]
    demo.perform(f"kubectl delete pod {victim}", lambda: job.kube.delete("pods", victim, NAMESPACE), world=size)
    node = job.node_of(job.running()[-1])
    demo.perform(f"kill {node} (kubelet and all containers)", lambda: verbs.kill(node), world=size)
    console.print(f"    restart {node}")
    verbs.restart(node)
    demo.perform("kubectl scale --replicas=4", lambda: job.kube.scale(job.name, NAMESPACE, 4), world=4)
    demo.perform("kubectl scale --replicas=2", lambda: job.kube.scale(job.name, NAMESPACE, 2), world=2)


def prepare() -> tuple[Kube, Path]:
    """Start the cluster, load the images, install the operator, and create an empty namespace."""
    with ThreadPoolExecutor() as pool:
        archives = pool.submit(build_all)  # downloads, while the cluster's programs compile
        cluster_dir = verbs.up().parent
        for archive in archives.result():
            verbs.load(archive)
    kube = Kube(cluster_dir / "kubeconfig")
    console.print("[bold]helm upgrade --install elasticjob charts/elasticjob[/]")
    install(kube, cluster_dir)
    kube.recreate_namespace(NAMESPACE)
    return kube, cluster_dir


def start(kube: Kube, cluster_dir: Path, manifest: Path) -> Demo:
    """Apply the manifest and record the job's status from now on."""
    body: Json = yaml.safe_load(manifest.read_text())
    clean_checkpoints(body)
    console.print(f"[bold]kubectl apply -f {manifest.relative_to(ROOT)}[/]")
    job = Job(kube, NAMESPACE, body["metadata"]["name"])
    demo = Demo(kube, cluster_dir, job, LogBook(kube, NAMESPACE, job.name).__enter__())
    demo.actions.append(Action(time.time(), f"kubectl apply -f {manifest.relative_to(ROOT)}", body["spec"]["replicas"]))
    kube.create("elasticjobs", body, NAMESPACE)
    threading.Thread(target=demo.watch, daemon=True).start()
    return demo


def clean_checkpoints(body: Json) -> None:
    """Delete the checkpoints of an earlier demo, so that training starts at step 0."""
    for volume in body["spec"]["template"]["spec"].get("volumes", []):
        directory = Path(volume.get("hostPath", {}).get("path", "/nonexistent"))
        if directory.name.startswith("elasticjob-") and directory.is_dir():
            for checkpoint in directory.glob("*"):
                checkpoint.unlink()


def report(actions: list[Action], steps: list[Step], snapshots: list[Snapshot], folder: Path) -> None:
    """Print the timeline, and write it as JSON and as a picture."""
    results = rows(actions, steps, snapshots)
    console.print(timeline_table(results))
    folder.mkdir(exist_ok=True)
    (folder / "timeline.json").write_text(json.dumps([asdict(r) for r in results], indent=1))
    picture.draw(folder / "loss.png", steps, results)
    console.print(f"picture: {folder / 'loss.png'}", soft_wrap=True)
    console.print(f"figures: {folder / 'timeline.json'}", soft_wrap=True)


def timeline_table(results: list[Row]) -> Table:
    """Return the timeline. The status changes are below their action, so that it fits into 80 columns."""
    table = Table(
        title="Faults and actions, and the time until the next training step", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("", justify="right")
    table.add_column("fault or action", overflow="fold")
    for column in ("next step", "pause", "full size"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(results, 1):
        description = Text("\n").join([Text(row.action.what), *(Text(s, style="dim") for s in row.status)])
        table.add_row(
            str(number), description, _seconds(row.next_step), _seconds(row.pause), _seconds(row.full_size)
        )  # fmt: skip
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def play(demo: Demo) -> None:
    """Wait for the first steps, perform the actions, wait for the job's end. The live view stays on the screen."""
    with Live(get_renderable=demo.table, console=console, refresh_per_second=4, transient=True):
        first = demo.book.wait_steps_after(demo.actions[0].time, timeout=180)
        console.print(f"first training step {first.time - demo.actions[0].time:.1f} s after apply")
        demo.job.wait("FullyScaled", timeout=60)
        demo.book.wait_step(first.step + 25, timeout=120)
        act(demo)
        console.print("[bold]kubectl wait --for=condition=Complete[/]")
        demo.job.wait("Complete", timeout=300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples/digits.yaml", help="manifest of the job")
    parser.add_argument("--local", action="store_true", help="run processes of this machine instead of a cluster")
    options = parser.parse_args()
    local = options.local
    if not local and os.geteuid() != 0 and not docker_answers():
        console.print("[bold]no root and no Docker: running the same job as local processes instead of on a cluster[/]")
        local = True
    return without_cluster(options.manifest) if local else on_cluster(options.manifest)


def without_cluster(manifest: Path) -> int:
    begin = time.time()
    stage, code = asyncio.run(local_play(manifest, console))
    ended = time.time()
    report(stage.actions, stage.steps, stage.snapshots, ROOT / ".demo")
    print_times("Complete" if code == 0 else "not complete", ended - stage.actions[0].time, time.time() - begin)
    return code


def on_cluster(manifest: Path) -> int:
    begin = time.time()
    kube, cluster_dir = prepare()
    demo = start(kube, cluster_dir, manifest.resolve())
    play(demo)
    ended = time.time()
    report(demo.actions, demo.book.steps, demo.snapshots, ROOT / ".demo")
    final = demo.job.read()
    complete = is_true(final, "Complete")
    console.print(f"restarts that count towards maxRestarts: {final['status'].get('restartsCountTowardsMax', 0)}")
    command = f"KUBECONFIG={cluster_dir}/kubeconfig {cluster_dir}/bin/kubectl -n {NAMESPACE} get ej"
    console.print(f"inspect the cluster: {command}", soft_wrap=True)
    print_times("Complete" if complete else "not complete", ended - demo.actions[0].time, time.time() - begin)
    return 0 if complete else 1


def print_times(outcome: str, job: float, total: float) -> None:
    """Print the outcome, the job's time and the whole demo's time (seconds)."""
    console.print(f"[bold]{outcome}[/]: the job took {job:.0f} s, the whole demo {total:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
