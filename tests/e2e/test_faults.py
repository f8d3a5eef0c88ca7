"""Faults while a job trains: workers, pods, nodes, links, the store and the operator fail."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import verbs
from support.cluster.install import SYSTEM
from support.cluster.jobs import Job, end_soon, kill_worker, slow_digits
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LATE, LogBook
from support.common import processes

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
LEASE = "elasticjob-operator"
TWO_TO_THREE = {"minReplicas": 2, "maxReplicas": 3}


def start(submit: Submit, follow: Follow, shared_dir: str, name: str) -> tuple[Job, LogBook]:
    """Start a job of three nodes, and wait until it has trained a few steps."""
    job = submit(slow_digits(name, shared_dir, elasticPolicy=TWO_TO_THREE))
    book = follow(job)
    book.wait_step(5, timeout=120)
    job.wait_status(worldSize=3)
    return job, book


def kill_operator(kube: Kube) -> None:
    for pod in kube.list("pods", SYSTEM):
        kube.delete("pods", pod["metadata"]["name"], SYSTEM, grace=0)


def assert_completes(job: Job, shared_dir: str, *, restarts: int) -> None:
    """Let the job train without delays, and assert that it completes with exactly `restarts` restarts."""
    end_soon(shared_dir)
    job.wait("Complete", timeout=240)
    status = job.status()
    assert (status["restarts"], status.get("restartsCountTowardsMax", 0)) == (restarts, restarts)


def operator_dies(*, in_make_test: bool) -> pytest.MarkDecorator:
    """Run a test with and without the death of the operator's pods: one of both rows in `make test`, the other deep."""
    rows = [
        pytest.param(
            dies,
            id=name,
            marks=[pytest.mark.alone] * dies + [pytest.mark.deep] * (dies is not in_make_test),
        )
        for dies, name in ((False, ""), (True, "operator-dies-too"))
    ]
    return pytest.mark.parametrize("operator_dies", rows)


@operator_dies(in_make_test=False)
def test_a_worker_is_killed(
    submit: Submit, follow: Follow, shared_dir: str, cluster_dir: Path, kube: Kube, operator_dies: bool
) -> None:
    job, _ = start(submit, follow, shared_dir, "worker-killed")
    kill_worker(cluster_dir, job, "worker-killed-1-0")
    if operator_dies:
        kill_operator(kube)
    assert_completes(job, shared_dir, restarts=1)
    failure = job.status()["lastFailure"]
    assert (failure["pod"], failure["signal"], failure["class"]) == ("worker-killed-1-0", "SIGKILL", "Killed")
    assert job.status()["incarnations"] == "0,0,0"
    # Status has the failure in any case. An operator that is killed after it has written that may not write the Event.
    job.wait_events("WorldFormed", "Completed", *(() if operator_dies else ("WorkerFailed",)))


@operator_dies(in_make_test=True)
def test_a_pod_is_deleted(submit: Submit, follow: Follow, shared_dir: str, kube: Kube, operator_dies: bool) -> None:
    job, book = start(submit, follow, shared_dir, "pod-deleted")
    kube.delete("pods", "pod-deleted-0-0", job.namespace)
    moment = time.time()
    if operator_dies:
        kill_operator(kube)
    book.wait_steps_after(moment, world=2, timeout=60)
    book.wait_steps_after(moment, world=3, incarnation=1, timeout=120)
    assert_completes(job, shared_dir, restarts=0)


def test_a_spare_takes_the_place_of_a_deleted_pod(submit: Submit, follow: Follow, shared_dir: str, kube: Kube) -> None:
    policy = {"minReplicas": 2, "maxReplicas": 2, "spares": 1}
    job = submit(slow_digits("spared", shared_dir, elasticPolicy=policy))
    book = follow(job)
    book.wait_step(5, timeout=120)
    before = job.wait_status(worldSize=2, standby=1, ready=3)["status"]
    victim = book.steps[0].pod
    kube.delete("pods", victim, job.namespace)
    job.wait_world(2, after=before["rendezvousRound"], timeout=60)
    # Until its pod has ended, the node that leaves may be the standby.
    job.wait_status(worldSize=2, standby=1, ready=3, terminating=0)
    assert job.status()["rendezvousRound"] == before["rendezvousRound"] + 1
    assert_completes(job, shared_dir, restarts=0)
    assert {s.world for s in book.steps} == {2}


@pytest.mark.alone
@operator_dies(in_make_test=True)
def test_a_node_is_killed(submit: Submit, follow: Follow, shared_dir: str, kube: Kube, operator_dies: bool) -> None:
    job, book = start(submit, follow, shared_dir, "node-killed")
    victim = job.node_of("node-killed-2-0")
    try:
        verbs.kill(victim)
        moment = time.time()
        if operator_dies:
            kill_operator(kube)
        book.wait_steps_after(moment + LATE, timeout=60)
        step = book.wait_steps_after(moment, world=3, incarnation=1, timeout=180)
        assert job.node_of(step.pod) != victim
        assert_completes(job, shared_dir, restarts=0)
    finally:
        verbs.restart(victim)


@pytest.mark.alone
@operator_dies(in_make_test=False)
def test_a_node_is_cut_off_and_healed(
    submit: Submit, follow: Follow, shared_dir: str, kube: Kube, operator_dies: bool
) -> None:
    job, book = start(submit, follow, shared_dir, "node-cut")
    victim = job.node_of("node-cut-1-0")
    try:
        verbs.cut(victim)
        moment = time.time()
        if operator_dies:
            kill_operator(kube)
        book.wait_steps_after(moment, world=2, timeout=60)
    finally:
        verbs.heal(victim)
    book.wait_steps_after(time.time(), world=3, timeout=60)
    assert_completes(job, shared_dir, restarts=0)


def test_the_store_pod_is_deleted(submit: Submit, follow: Follow, shared_dir: str, kube: Kube) -> None:
    job, book = start(submit, follow, shared_dir, "store-gone")
    kube.delete("pods", "store-gone-rdzv-0", job.namespace)
    moment = time.time()
    job.wait_store(1, timeout=60)
    assert_completes(job, shared_dir, restarts=0)
    assert {s.world for s in book.steps if s.time > moment} == {3}


@pytest.mark.alone
def test_the_node_that_has_the_store_is_cut_off_and_healed(
    submit: Submit, follow: Follow, shared_dir: str, kube: Kube
) -> None:
    """The old store keeps running until its kubelet is connected again."""
    job, book = start(submit, follow, shared_dir, "store-cut")
    victim = job.node_of("store-cut-rdzv-0")
    try:
        verbs.cut(victim)
        job.wait_store(1, timeout=60)
        book.wait_steps_after(time.time(), timeout=60)
    finally:
        verbs.heal(victim)
    assert_completes(job, shared_dir, restarts=0)
    kube.wait_gone("pods", job.namespace, job.stores, timeout=60)


@pytest.mark.alone
def test_two_operators_at_once_do_no_harm(
    submit: Submit, follow: Follow, shared_dir: str, kube: Kube, cluster_dir: Path
) -> None:
    """The leader is frozen until another operator leads; then it runs again and still acts as leader."""
    job, _ = start(submit, follow, shared_dir, "two-operators")
    frozen = leader(kube)
    processes.send(frozen, signal.SIGSTOP)
    try:
        name = frozen["metadata"]["name"]
        kube.wait(
            "leases",
            LEASE,
            SYSTEM,
            lambda lease: holder(lease) not in ("", name),
            timeout=90,
            what="another operator leads",
        )
    finally:
        processes.send(frozen, signal.SIGCONT)
    kill_worker(cluster_dir, job, "two-operators-0-0")
    assert_completes(job, shared_dir, restarts=1)
    assert sorted(p["metadata"]["name"] for p in job.pods()) == [f"two-operators-{i}-0" for i in range(3)]


def leader(kube: Kube) -> Json:
    """Return the operator pod that holds the Lease."""
    lease = kube.wait("leases", LEASE, SYSTEM, lambda lease: holder(lease) != "", timeout=60, what="an operator leads")
    return kube.get("pods", holder(lease), SYSTEM)


def holder(lease: Json) -> str:
    """Return the name of the pod that holds a Lease."""
    return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]
