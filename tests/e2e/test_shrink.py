"""A job in a queue of the real Kueue gives some of its pods up to more urgent jobs, and gets them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support.cluster import kueue as real
from support.cluster.jobs import Job
from support.cluster.kube import Json, Kube, condition
from support.cluster.logbook import LogBook
from support.cluster.steps import (
    Balance,
    assert_every_step,
    assert_none_lost,
    elastic_job,
    queues,
    quota,
    take_a_step,
    urgent_job,
)
from support.docs.blocks import all_blocks

pytestmark = pytest.mark.alone

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
QUOTA = 4
"""For how many pods the queue has quota."""
PAGE = "docs/operate/kueue.md"


@pytest.fixture
def version(kube: Kube, cluster_dir: Path, namespace: str) -> Iterator[str]:
    """Kueue with a queue `team` for QUOTA pods, and an operator that uses it; a version from before any job."""
    with queues(kube, cluster_dir, namespace, ["team"], QUOTA, step_class=class_on_page()) as before:
        yield before


def class_on_page() -> Json:
    """Return the priority class of steps that docs/operate/kueue.md shows."""
    blocks = (yaml.safe_load(b.text) for b in all_blocks() if b.page == PAGE and b.language == "yaml")
    return next(found for found in blocks if found.get("kind") == "WorkloadPriorityClass")


def urgent(name: str, shared_dir: str) -> Json:
    """Return an urgent job of one pod, which runs until the file `end` exists."""
    script = "import os, time\nwhile not os.path.exists('/shared/end'): time.sleep(0.1)"
    return urgent_job(
        name,
        "team",
        ["python3", "-c", script],
        mounts=[{"name": "shared", "mountPath": "/shared"}],
        volumes=[{"name": "shared", "hostPath": {"path": shared_dir, "type": "Directory"}}],
    )


def wait_used(kube: Kube, pods: int) -> None:
    """Wait until the quota of so many pods is used."""
    used = {"0"} if not pods else {quota(pods)}
    what = f"the quota of {pods} pods is used"
    kube.wait("clusterqueues", "team", None, lambda found: real.used_cpu(found) in used, timeout=90, what=what)


def take(job: Job, other: Json, submit: Submit, pods: int) -> None:
    """Submit an urgent job of one pod, wait until the job has so many pods left, and print how long that takes."""
    taken = take_a_step(job, lambda: submit(other), other["metadata"]["name"], pods)
    print(
        f"{other['metadata']['name']}: step evicted {taken.evicted:.2f} s after it was submitted, pods gone "
        f"{taken.gone:.2f} s later, admitted {taken.admitted:.2f} s after that",
        flush=True,
    )


def test_a_job_gives_its_steps_to_more_urgent_jobs_and_grows_back(
    version: str, submit: Submit, follow: Follow, kube: Kube, namespace: str, shared_dir: str
) -> None:
    job = submit(elastic_job("shrinks", "team", 2, 4))
    balance, book = Balance(job, version), follow(job)
    book.wait_steps_after(time.time(), world=4, timeout=120)
    wait_used(kube, 4)

    take(job, urgent("first", shared_dir), submit, pods=3)
    book.wait_steps_after(time.time(), world=3, timeout=90)
    take(job, urgent("second", shared_dir), submit, pods=2)
    book.wait_steps_after(time.time(), world=2, timeout=90)
    found = job.wait("FullyScaled", status="False", reason="InsufficientCapacity", timeout=90)
    assert "queue team has quota for 2 of 4 pods: Workload " in condition(found, "FullyScaled")["message"]
    wait_used(kube, 4)

    (Path(shared_dir) / "end").touch()
    book.wait_steps_after(time.time(), world=4, timeout=90)
    job.wait("FullyScaled", reason="AtDesiredReplicas", timeout=90)
    wait_used(kube, 4)
    status = job.status()
    assert (status["executionAttempts"], status["restarts"], status["restartsCountTowardsMax"]) == (1, 0, 0)
    for pod in ("shrinks-0-0", "shrinks-1-0"):
        assert_none_lost(book, pod)
    assert_every_step(book)
    balance.assert_kept(4)
