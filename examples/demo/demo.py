"""`make demo`: train one elastic job on a real Kubernetes cluster while workers, pods and nodes fail."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
from support.cluster.images import build_all  # noqa: E402
from support.cluster.install import install  # noqa: E402
from support.cluster.jobs import Job, kill_worker  # noqa: E402
from support.cluster.kube import ApiError, Json, Kube, condition, is_true  # noqa: E402
from support.cluster.logbook import LogBook, Step  # noqa: E402
from timeline import Action, Row, Snapshot, rows  # noqa: E402

NAMESPACE = "demo"
PLAIN = ROOT / "examples/digits.yaml"
IN_PROCESS = ROOT / "examples/restartable.yaml"
"""A job whose processes survive the end of a round. It comes second, with the faults that concern processes."""
console = Console(highlight=False)
_PID = re.compile(r"\bpid=(\d+)\b")


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
                    if is_true(job, "Failed"):
                        self.give_up(condition(job, "Failed").get("message", ""))
            except (OSError, ApiError, ValueError):
                time.sleep(0.5)

    def give_up(self, message: str) -> None:
        """End the demo: its main thread waits for steps that will not come."""
        console.print(f"[bold red]Failed[/]: {message}")
        command = f"kubectl -n {NAMESPACE} logs -l elasticjob.dev/job-name={self.job.name} --prefix --tail=20"
        console.print(f"logs: {command}", soft_wrap=True)
        os._exit(1)

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
    scale(demo)


def act_in_process(demo: Demo) -> None:
    """Perform the faults and actions of the job whose processes survive them."""
    job = demo.job
    size = int(job.status()["worldSize"])
    victim = job.running()[1]
    demo.perform(
        f"SIGKILL a worker process in {victim}", lambda: kill_worker(demo.cluster_dir, job, victim), world=size
    )
    removed = job.running()[0]
    demo.perform(f"kubectl delete pod {removed}", lambda: job.kube.delete("pods", removed, NAMESPACE), world=size)
    scale(demo)


def scale(demo: Demo) -> None:
    """Scale the job up and down."""
    job = demo.job
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
    create_scripts(kube, body)
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


def create_scripts(kube: Kube, body: Json) -> None:
    """Create the ConfigMap of the job's script, as the head of the manifest says."""
    for volume in body["spec"]["template"]["spec"].get("volumes", []):
        if name := volume.get("configMap", {}).get("name"):
            script = ROOT / "examples" / body["metadata"]["name"] / "train.py"
            console.print(f"[bold]kubectl create configmap {name} --from-file={script.relative_to(ROOT)}[/]")
            kube.create(
                "configmaps", {"metadata": {"name": name}, "data": {script.name: script.read_text()}}, NAMESPACE
            )


def report(manifest: Path, actions: list[Action], steps: list[Step], snapshots: list[Snapshot]) -> None:
    """Print the timeline, and write it as JSON and as a picture."""
    results = rows(actions, steps, snapshots)
    console.print(timeline_table(results, manifest.stem))
    folder = ROOT / ".demo"
    folder.mkdir(exist_ok=True)
    figures, drawing = folder / f"{manifest.stem}.json", folder / f"{manifest.stem}.png"
    figures.write_text(json.dumps([asdict(r) for r in results], indent=1))
    picture.draw(drawing, steps, results)
    console.print(f"picture: {drawing}", soft_wrap=True)
    console.print(f"figures: {figures}", soft_wrap=True)


def timeline_table(results: list[Row], job: str) -> Table:
    """Return the timeline of a job. The status changes are below their action, so that it fits into 80 columns."""
    table = Table(
        title=f"{job}: faults and actions, and the time until the next step", box=box.SIMPLE_HEAD, pad_edge=False
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


def play(demo: Demo, act: Callable[[Demo], None]) -> None:
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
    parser.add_argument("--manifest", type=Path, help="manifest of the only job (default: two of examples/)")
    parser.add_argument("--local", action="store_true", help="run processes of this machine instead of a cluster")
    options = parser.parse_args()
    local = options.local
    if not local and os.geteuid() != 0 and not docker_answers():
        console.print("[bold]no root and no Docker: running the jobs as local processes instead of on a cluster[/]")
        local = True
    manifests = [options.manifest.resolve()] if options.manifest else [PLAIN, IN_PROCESS]
    begin = time.time()
    outcomes = without_cluster(manifests) if local else on_cluster(manifests)
    console.print(f"the whole demo took {time.time() - begin:.0f} s")
    return 0 if all(outcomes) else 1


def without_cluster(manifests: Sequence[Path]) -> list[bool]:
    """Run the jobs as local processes, one after the other. Return whether each is Complete."""
    outcomes = []
    for manifest in manifests:
        stage, code = asyncio.run(local_play(manifest, console))
        outcomes.append(code == 0)
        report(manifest, stage.actions, stage.steps, stage.snapshots)
        print_time(manifest, outcomes[-1], time.time() - stage.actions[0].time)
    return outcomes


def on_cluster(manifests: Sequence[Path]) -> list[bool]:
    """Run the jobs on a cluster, one after the other. Return whether each is Complete."""
    kube, cluster_dir = prepare()
    outcomes = []
    for manifest in manifests:
        demo = start(kube, cluster_dir, manifest)
        play(demo, act_in_process if manifest == IN_PROCESS else act)
        ended = time.time()
        report(manifest, demo.actions, demo.book.steps, demo.snapshots)
        final = demo.job.read()
        outcomes.append(is_true(final, "Complete"))
        console.print(f"restarts that count towards maxRestarts: {final['status'].get('restartsCountTowardsMax', 0)}")
        print_time(manifest, outcomes[-1], ended - demo.actions[0].time)
        print_processes(demo.book)
    command = f"KUBECONFIG={cluster_dir}/kubeconfig {cluster_dir}/bin/kubectl -n {NAMESPACE} get ej"
    console.print(f"inspect the cluster: {command}", soft_wrap=True)
    return outcomes


def print_time(manifest: Path, complete: bool, seconds: float) -> None:
    """Print a job's outcome and how long it took."""
    console.print(f"[bold]{'Complete' if complete else 'not complete'}[/]: {manifest.stem} took {seconds:.0f} s")


def print_processes(book: LogBook) -> None:
    """Print how many processes trained in each pod, if the script logs its process id."""
    processes: dict[str, set[str]] = {}
    for line in book.lines:
        if found := _PID.search(line.text):
            processes.setdefault(line.pod, set()).add(found[1])
    if processes:
        counts = ", ".join(f"{pod}: {len(pids)}" for pod, pids in sorted(processes.items()))
        console.print(f"processes that trained in each pod: {counts}")


if __name__ == "__main__":
    sys.exit(main())
