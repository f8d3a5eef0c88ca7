"""A job whose training function survives the end of a round: examples/restartable.yaml, as users apply it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from support.cluster.jobs import RESTARTABLE_STEPS, Job, end_soon, kill_worker, slow_restartable
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]


def processes(book: LogBook, pod: str) -> set[str]:
    """Return the ids of the processes that trained in a pod."""
    return set(re.findall(r"\bstep=\d+ .*\bpid=(\d+)", book.text(pod)))


def test_processes_survive_a_killed_worker_and_a_deleted_pod(
    submit: Submit, follow: Follow, cluster_dir: Path, kube: Kube, namespace: str, shared_dir: str
) -> None:
    job = submit(slow_restartable(kube, namespace, shared_dir))
    book = follow(job)
    book.wait_step(5, timeout=120)
    job.wait_status(worldSize=3)
    moment = kill_worker(cluster_dir, job, "restartable-1-0")
    again = book.wait_steps_after(moment, world=3, timeout=60)
    book.wait_step(again.step + 5, timeout=60)
    kube.delete("pods", "restartable-2-0", namespace)
    moment = time.time()
    book.wait_steps_after(moment, world=2, timeout=60)
    book.wait_steps_after(moment, world=3, incarnation=1, timeout=120)
    end_soon(shared_dir)
    job.wait("Complete", timeout=240)
    book.wait_read()
    assert len(processes(book, "restartable-0-0")) == 1  # three rounds and more, one process
    assert len(processes(book, "restartable-1-0")) == 2  # the killed one and its successor
    steps = sorted({step.step for step in book.steps})
    assert steps == list(range(1, RESTARTABLE_STEPS + 1))
    status = job.status()
    assert (status["restarts"], status["restartsCountTowardsMax"]) == (1, 1)
    transfer = status["stateTransfer"]
    assert (transfer["pod"], transfer["interface"]) == ("restartable-2-1", "eth0")
    assert transfer["bytes"] > 0
    assert transfer["seconds"] > 0
