"""Two jobs with steps share a cohort of queues of the real Kueue, while more urgent Workloads come and go at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.waiting import until
from support.cluster import kueue as real
from support.cluster.jobs import Job
from support.cluster.kube import Json, Kube, is_true
from support.cluster.logbook import LogBook
from support.cluster.steps import (
    RESOURCES,
    URGENT,
    Balance,
    assert_every_step,
    assert_none_lost,
    elastic_job,
    queues,
)

pytestmark = [pytest.mark.alone, pytest.mark.deep, pytest.mark.timeout(1800)]

QUEUES, NOMINAL, LOW, HIGH = ("left", "right"), 3, 1, 5
"""The queues, the pods of each one's own quota, and the fewest and most pods of each job."""
EVICTIONS = 50


@pytest.fixture
def version(kube: Kube, cluster_dir: Path, namespace: str) -> Iterator[str]:
    """Kueue with the queues, and an operator that uses it; a version of the cluster from before any job."""
    with queues(kube, cluster_dir, namespace, QUEUES, NOMINAL, cohort="both") as before:
        yield before


def urgent(name: str, queue: str, pods: int) -> Json:
    """Return an urgent Workload for so many pods, which nobody creates: it takes the quota until it is deleted."""
    container = {"name": "main", "image": "none", "resources": RESOURCES}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": URGENT["metadata"]["name"]}
    spec = {
        "queueName": queue,
        "priority": URGENT["value"],
        "priorityClassRef": reference,
        "podSets": [{"name": "main", "count": pods, "template": template}],
    }
    return {"apiVersion": real.API, "kind": "Workload", "metadata": {"name": name}, "spec": spec}


def evictions(balances: list[Balance]) -> int:
    return sum(len(balance.evictions) for balance in balances)


def come_and_go(kube: Kube, namespace: str, balances: list[Balance], book: LogBook, rng: random.Random) -> list[float]:
    """Create and delete urgent Workloads until there were EVICTIONS; return how long each waited, in seconds.

    They never ask for more than a queue has beyond the fewest pods of its job.
    """
    present: dict[str, tuple[str, int]] = {}
    waited: list[float] = []
    while evictions(balances) < EVICTIONS:
        queue = rng.choice(QUEUES)
        free = NOMINAL - LOW - sum(pods for of, pods in present.values() if of == queue)
        if free:
            name, pods = f"urgent-{len(waited)}", rng.randint(1, free)
            begin = time.monotonic()
            kube.create("workloads", urgent(name, queue, pods), namespace)
            admitted = lambda found: is_true(found, "Admitted")  # noqa: E731
            kube.wait("workloads", name, namespace, admitted, timeout=90, what=f"{name} is admitted")
            waited.append(time.monotonic() - begin)
            present[name] = queue, pods
        book.wait_step(book.steps[-1].step + rng.randint(1, 40), timeout=90)
        if present and (not free or rng.random() < 0.6):
            name = rng.choice(sorted(present))
            del present[name]
            kube.delete("workloads", name, namespace)
    for name in present:
        kube.delete("workloads", name, namespace)
    return waited


def test_fifty_evictions_of_steps_lose_no_step(
    version: str, submit: Callable[[Json], Job], follow: Callable[[Job], LogBook], kube: Kube, namespace: str
) -> None:
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    jobs = [submit(elastic_job(name, name, LOW, HIGH)) for name in QUEUES]
    balances, books = [Balance(job, version) for job in jobs], [follow(job) for job in jobs]
    for book in books:
        book.wait_steps_after(time.time(), world=NOMINAL, timeout=180)
    waited = sorted(come_and_go(kube, namespace, balances, books[0], random.Random(seed)))
    for book in books:
        book.wait_steps_after(time.time(), world=NOMINAL, timeout=180)
    until("each job has its own quota", lambda: settled(balances), timeout=180)
    before = evictions(balances)
    for book in books:
        book.wait_step(book.steps[-1].step + 200, timeout=180)
    assert evictions(balances) == before, "jobs that take pods from each other in turns"
    for job, book, balance in zip(jobs, books, balances, strict=True):
        balance.assert_kept(NOMINAL, LOW)
        status = job.status()
        assert (status["executionAttempts"], status["restarts"], status["restartsCountTowardsMax"]) == (1, 0, 0)
        assert_none_lost(book, f"{job.name}-0-0")
        assert_every_step(book)
    print(
        f"{evictions(balances)} evictions; urgent Workloads were admitted after {waited[len(waited) // 2]:.2f} s "
        f"(median of {len(waited)}), {waited[-1]:.2f} s at most"
    )


def settled(balances: list[Balance]) -> str | None:
    found = [balance.last() for balance in balances]
    return None if found == [(NOMINAL, NOMINAL)] * len(balances) else f"(pods, quota) of the jobs: {found}"
