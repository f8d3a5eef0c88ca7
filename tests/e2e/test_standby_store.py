"""The loss of the machine that has the store, alone and with the operator's leader: the standby store takes over."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from cluster import verbs
from support.cluster.install import SYSTEM
from support.cluster.jobs import Job, end_soon, slow_digits
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LATE, LogBook

pytestmark = pytest.mark.alone

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]


def start(submit: Submit, follow: Follow, shared_dir: str, name: str) -> tuple[Job, LogBook]:
    """Start a job of three nodes, and wait until all of them know its standby store."""
    elastic = {"minReplicas": 2, "maxReplicas": 3}
    job = submit(slow_digits(name, shared_dir, elasticPolicy=elastic))
    book = follow(job)
    book.wait_step(5, timeout=120)
    job.wait_status(worldSize=3)
    standby = job.wait_standby_store(timeout=60)
    assert job.node_of(standby) != job.node_of(f"{name}-rdzv-0")

    def informed() -> bool:
        return len({line.pod for line in book.lines if "store 1 is the standby store" in line.text}) == 3

    book.wait(informed, timeout=60, what="all nodes know it")
    return job, book


@pytest.mark.parametrize(
    ("fault", "undo", "operator_dies"),
    [
        pytest.param(verbs.kill, verbs.restart, True, id="kill-operator-dies-too"),
        pytest.param(verbs.cut, verbs.heal, False, id="cut"),
        pytest.param(verbs.kill, verbs.restart, False, id="kill", marks=pytest.mark.deep),
        pytest.param(verbs.cut, verbs.heal, True, id="cut-operator-dies-too", marks=pytest.mark.deep),
    ],
)
def test_the_machine_of_the_store_is_lost(
    submit: Submit,
    follow: Follow,
    shared_dir: str,
    kube: Kube,
    fault: Callable[[str], None],
    undo: Callable[[str], None],
    operator_dies: bool,
) -> None:
    name = f"standby-{fault.__name__}-{int(operator_dies)}"
    job, book = start(submit, follow, shared_dir, name)
    victim = job.node_of(f"{name}-rdzv-0")
    try:
        if operator_dies:
            for pod in kube.list("pods", SYSTEM):
                kube.delete("pods", pod["metadata"]["name"], SYSTEM, grace=0)
        fault(victim)
        book.wait_steps_after(time.time() + LATE, timeout=60)
        job.wait_store(1, timeout=120)
    finally:
        undo(victim)
    end_soon(shared_dir)
    job.wait("Complete", timeout=300)
    assert job.status()["restarts"] == 0
