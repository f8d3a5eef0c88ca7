"""Workers that save on SIGTERM have the time for it when their job is scaled, drained or deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cluster.jobs import Job, kubectl, manifest
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]

SAVES = """
import os, pathlib, signal, sys, time

rank, world, node = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["HOSTNAME"]

def save(*_):
    time.sleep(6)  # longer than stopGraceSeconds, and than the pod that replaces this one takes to connect
    pathlib.Path("/checkpoint", f"saved {node} of {world}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("began rank", rank, "of", world, flush=True)
while True:
    time.sleep(0.02)
"""


def saving_job(shared_dir: str, **spec: object) -> Json:
    """Return a job of two nodes whose workers write a file into the folder when they have saved."""
    volume = {"name": "checkpoint", "hostPath": {"path": shared_dir, "type": "DirectoryOrCreate"}}
    mounts = [{"name": "checkpoint", "mountPath": "/checkpoint"}]
    policy = {"minReplicas": 1, "maxReplicas": 2}
    command = ["python3", "-c", SAVES]
    return manifest("saves", command, replicas=2, elasticPolicy=policy, volumes=[volume], mounts=mounts, **spec)


@pytest.fixture
def nodes(submit: Submit, follow: Follow, shared_dir: str) -> tuple[Job, LogBook, Path]:
    """A running job of two nodes; its workers write a file into the folder when they have saved."""
    job = submit(saving_job(shared_dir))
    book = follow(job)
    wait_began(book, 2)
    return job, book, Path(shared_dir)


def wait_began(book: LogBook, world: int, rounds: int = 1) -> None:
    """Wait until all ranks have begun in this many rounds of `world` ranks."""
    expected = [f"began rank {rank} of {world}" for rank in range(world)]
    book.wait(
        lambda: all(book.text().count(line) >= rounds for line in expected), timeout=120, what=f"{rounds} x {expected}"
    )


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved *"))


@contextmanager
def cordoned(cluster_dir: Path, machine: str) -> Iterator[None]:
    """Let the machine accept pods again in the end."""
    try:
        yield
    finally:
        kubectl(cluster_dir, "uncordon", machine)


def test_all_workers_save_when_the_job_is_scaled_down(
    nodes: tuple[Job, LogBook, Path], cluster_dir: Path, namespace: str
) -> None:
    job, book, folder = nodes
    kubectl(cluster_dir, "scale", "-n", namespace, "elasticjob/saves", "--replicas=1")
    wait_began(book, 1)
    assert saved(folder) == ["saved saves-0 of 2", "saved saves-1 of 2"]
    assert job.status()["restarts"] == 0


@pytest.mark.alone
def test_all_workers_save_when_a_node_is_drained(
    nodes: tuple[Job, LogBook, Path], cluster_dir: Path, namespace: str
) -> None:
    job, book, folder = nodes
    job.wait_standby_store(timeout=60)
    machines = {job.node_of(pod) for pod in ("saves-0-0", "saves-1-0")}
    store = job.node_of(job.serving_store())
    # The store's machine if it has a worker: then the standby store plans the end.
    machine = store if store in machines else machines.pop()
    print(f"draining {machine}; the store is on {store}, workers on {machines}")
    with cordoned(cluster_dir, machine):
        drain = ["drain", machine, "--pod-selector=elasticjob.dev/job-name=saves", "--force", "--ignore-daemonsets"]
        print(kubectl(cluster_dir, *drain, "--delete-emptydir-data"))
        wait_began(book, 2, rounds=2)
    assert {"saved saves-0 of 2", "saved saves-1 of 2"} <= set(saved(folder))
    assert job.status()["restarts"] == 0


def test_a_successor_waits_until_the_workers_of_the_deleted_pod_have_saved(
    submit: Submit, follow: Follow, shared_dir: str, namespace: str, kube: Kube
) -> None:
    job = submit(saving_job(shared_dir, podReplacementPolicy="Failed"))
    book = follow(job)
    wait_began(book, 2)
    # The finalizer keeps the object of the deleted pod: its status says when the container ended.
    kube.patch("pods", "saves-1-0", {"metadata": {"finalizers": ["elasticjob.dev/test"]}}, namespace)
    try:
        kube.delete("pods", "saves-1-0", namespace)
        wait_began(book, 2, rounds=2)
        old, new = (kube.get("pods", name, namespace) for name in ("saves-1-0", "saves-1-1"))
        (container,) = old["status"]["containerStatuses"]
        assert container["state"]["terminated"]["finishedAt"] <= new["metadata"]["creationTimestamp"]
        assert "saved saves-1 of 2" in saved(Path(shared_dir))
        assert job.status()["restarts"] == 0
    finally:
        kube.patch("pods", "saves-1-0", {"metadata": {"finalizers": None}}, namespace)


def test_all_workers_save_when_the_job_is_deleted(
    nodes: tuple[Job, LogBook, Path], cluster_dir: Path, namespace: str, kube: Kube
) -> None:
    job, _, folder = nodes
    job.wait_standby_store(timeout=60)  # a pod deleted while its interpreter starts stays for its grace
    kubectl(cluster_dir, "delete", "-n", namespace, "elasticjob/saves", "--cascade=foreground", timeout=300)
    assert saved(folder) == ["saved saves-0 of 2", "saved saves-1 of 2"]
    assert kube.list("pods", namespace, job.selector) == []
