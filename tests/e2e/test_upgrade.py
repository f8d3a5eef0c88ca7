"""helm upgrade and helm rollback while jobs train. `tests/integration` has the same with another version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from support.cluster.install import CHART, RELEASE, SYSTEM, install, wait_rolled_out
from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube
from support.cluster.kubectl import Tools
from support.cluster.logbook import LogBook

pytestmark = pytest.mark.alone

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
LONGEST_PAUSE = 1.0
"""Seconds from one step of a rank to the next; the script makes one every 0.1 s."""
STEPS = """
import os, time
for step in range(1, 100000):
    time.sleep(0.1)
    print(f"step={step} loss=0 world={os.environ['WORLD_SIZE']}", flush=True)
"""


@pytest.fixture
def tools(kube: Kube, cluster_dir: Path) -> Iterator[Tools]:
    """Helm on the release of all tests, which is as before after the test."""
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    yield tools
    if "upgraded" in tools.helm("get", "values", RELEASE, "-n", SYSTEM).output:
        install(kube, cluster_dir)


def operators(kube: Kube) -> set[str]:
    """Wait until the operator's Deployment has rolled out, and return the UIDs of its pods."""
    wait_rolled_out(kube)
    return uids(kube, SYSTEM)


def uids(kube: Kube, namespace: str) -> set[str]:
    """Return the UIDs of the pods that are not being deleted."""
    pods = kube.list("pods", namespace)
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def test_jobs_train_on_while_the_operator_is_upgraded_and_rolled_back(
    submit: Submit, follow: Follow, kube: Kube, tools: Tools, namespace: str
) -> None:
    small = {"requests": {"cpu": "10m", "memory": "32Mi"}}
    command = ["python3", "-c", STEPS]
    bodies = [manifest(name, command, replicas=2, preload=[], resources=small) for name in ("one", "two", "three")]
    jobs = [submit(body) for body in bodies]
    books = [follow(job) for job in jobs]
    for job, book in zip(jobs, books, strict=True):
        job.wait("FullyScaled")
        job.wait_standby_store(timeout=60)
        book.wait_step(5, timeout=60)
    pods, rounds = uids(kube, namespace), [job.status()["rendezvousRound"] for job in jobs]
    first, began = operators(kube), time.time()
    tools.helm("upgrade", RELEASE, str(CHART), "--set", "podAnnotations.upgraded=yes", "-n", SYSTEM)
    second = operators(kube)
    tools.helm("rollback", RELEASE, "-n", SYSTEM)
    assert not (first & second) | (second & operators(kube))
    for job in jobs:
        kube.patch("elasticjobs", job.name, {"spec": {"stopGraceSeconds": 2}}, namespace)
    for job, book, round_ in zip(jobs, books, rounds, strict=True):
        job.wait_status(observedGeneration=2, timeout=60)  # the last operator works on it
        job.wait("RendezvousReady", timeout=90)
        book.wait_steps_after(time.time(), timeout=90)
        status = job.status()
        assert (status["restarts"], status["rendezvousRound"], status["phase"]) == (0, round_, "Running")
        assert "recentFailures" not in status
        for pod in job.running():
            times = [step.time for step in book.steps if step.pod == pod and step.time > began - 1]
            assert max(later - earlier for earlier, later in pairwise(times)) < LONGEST_PAUSE
    assert uids(kube, namespace) == pods
