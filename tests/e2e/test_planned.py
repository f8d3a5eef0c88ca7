"""Planned ends on the real cluster: scaling and drains lose no step of a script that uses elasticjob.State."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from support.jobs import DIGITS, ROOM, Job, kubectl, manifest
from support.kube import Json, Kube
from support.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
EXAMPLE = Path(__file__).parents[2] / "examples" / "state" / "train.py"


def stateful(name: str, **spec: object) -> Json:
    """Return a job that runs the example from its source text; the agent provides the module `elasticjob`."""
    command = ["python3", "-c", EXAMPLE.read_text(), "--step-delay=0.05", "--steps=1000000"]
    policy = {"minReplicas": 2, "maxReplicas": 4}
    return manifest(name, command, elasticPolicy=policy, **spec)


def assert_none_lost(book: LogBook, pod: str) -> None:
    """Assert that a pod that ran all the time made every step once."""
    steps = [s.step for s in book.steps if s.pod == pod]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def pause(book: LogBook, pod: str, world: int, moment: float) -> float:
    """Return the seconds from the last step of the old world to the first of a world of size `world`, in one pod."""

    def gaps() -> list[float]:
        steps = [s for s in book.steps if s.pod == pod]
        return [b.time - a.time for a, b in pairwise(steps) if b.time > moment and b.world == world != a.world]

    book.wait(lambda: bool(gaps()), timeout=60, what=f"a step of {pod} in a world of {world}")
    return gaps()[0]


def test_scaling_loses_no_step(
    submit: Submit, follow: Follow, cluster_dir: Path, namespace: str, record_property: Callable[[str, object], None]
) -> None:
    job = submit(stateful("planned", replicas=3))
    book = follow(job)
    book.wait_step(20, timeout=120)
    for nodes in (4, 2, 3):
        moment = time.time()
        kubectl(cluster_dir, "scale", "-n", namespace, "elasticjob/planned", f"--replicas={nodes}")
        book.wait_steps_after(moment, world=nodes, timeout=120)
        job.wait_status(worldSize=nodes)
        record_property(f"pause to {nodes} nodes", round(pause(book, "planned-0-0", nodes, moment), 3))
    for pod in ("planned-0-0", "planned-1-0"):
        assert_none_lost(book, pod)
    assert job.status()["restarts"] == 0


def test_a_deleted_pod_loses_no_step(
    submit: Submit, follow: Follow, cluster_dir: Path, namespace: str, record_property: Callable[[str, object], None]
) -> None:
    job = submit(stateful("leaving", replicas=3))
    book = follow(job)
    book.wait_step(20, timeout=120)
    moment = time.time()
    kubectl(cluster_dir, "delete", "pod", "-n", namespace, "leaving-2-0", "--wait=false")
    book.wait_steps_after(moment, world=2, timeout=60)
    record_property("pause", round(pause(book, "leaving-0-0", 2, moment), 3))
    book.wait_steps_after(moment, world=3, timeout=120)
    for pod in ("leaving-0-0", "leaving-1-0"):
        assert_none_lost(book, pod)
    assert job.status()["restarts"] == 0


@pytest.fixture
def urgent(kube: Kube, namespace: str) -> Iterator[Json]:
    """A pod of high priority that needs a machine for itself."""
    group = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}}
    kube.create("priorityclasses", {**group, "value": 1000})
    container = {"name": "urgent", "image": DIGITS, "command": ["sleep", "600"], "resources": ROOM}
    yield {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {"priorityClassName": namespace, "containers": [container], "restartPolicy": "Never"},
    }
    kube.delete("priorityclasses", namespace)


def test_a_job_yields_to_a_pod_of_higher_priority_and_grows_back(
    submit: Submit, follow: Follow, kube: Kube, namespace: str, urgent: Json
) -> None:
    job = submit(stateful("yielding", replicas=3, resources=ROOM))
    book = follow(job)
    for _ in range(2):
        job.wait_status(worldSize=3)
        moment = time.time()
        book.wait_steps_after(moment, world=3, timeout=120)
        kube.create("pods", urgent, namespace)
        running = lambda pod: pod["status"].get("phase") == "Running"  # noqa: E731
        kube.wait("pods", "urgent", namespace, running, timeout=60, what="the urgent pod runs")
        job.wait_status(worldSize=2)
        last = max(s.time for s in book.steps if s.world == 3)
        print(f"the urgent pod ran {time.time() - last:.2f} s after the last step with three nodes")
        kube.delete("pods", "urgent", namespace, grace=0)
    job.wait_status(worldSize=3)
    book.wait_steps_after(time.time(), world=3, timeout=60)
    stayed = [name for name in job.running() if name.endswith("-0")]
    assert stayed, "at most one pod gives way each time"
    for pod in stayed:
        assert_none_lost(book, pod)
    status = job.status()
    assert (status["restarts"], status["restartsCountTowardsMax"]) == (0, 0)


def wait_for(job: Job, until: Callable[[Json], bool], what: str) -> Json:
    """Wait until the job's status meets the condition, and return the status."""
    found = job.kube.wait(
        "elasticjobs", job.name, job.namespace, lambda current: until(current.get("status", {})), timeout=120, what=what
    )
    status: Json = found["status"]
    return status


def machines(job: Job) -> set[str]:
    """Return the machines of the job's pods that are not being deleted, those of its stores included."""
    return {pod["spec"].get("nodeName", "") for pod in job.pods(job.selector)}


def wait_off(job: Job, machine: str) -> None:
    """Wait until no pod of the job is on the machine, but for those that are being deleted."""
    for _ in job.kube.watch("pods", job.namespace, selector=job.selector, timeout=120):
        if machine not in machines(job):
            return
    raise AssertionError(f"{job.name} still has pods on {machine}")


def test_pods_leave_a_machine_whose_end_is_announced_and_lose_no_step(
    submit: Submit, follow: Follow, kube: Kube
) -> None:
    job = submit(stateful("noticed", replicas=3))
    book = follow(job)
    book.wait_step(20, timeout=120)
    machine = job.node_of("noticed-2-0")
    stay = [pod for pod in ("noticed-0-0", "noticed-1-0") if job.node_of(pod) != machine]
    before = job.status()["rendezvousRound"]
    kube.patch("nodes", machine, {"metadata": {"annotations": {"elasticjob.dev/terminating": "test"}}})
    try:
        wait_off(job, machine)
        status = job.wait_world(3, after=before, timeout=120)
        book.wait_steps_after(time.time(), world=3, timeout=60)
        assert machine not in machines(job)
    finally:
        kube.patch("nodes", machine, {"metadata": {"annotations": {"elasticjob.dev/terminating": None}}})
    for pod in stay:
        assert_none_lost(book, pod)
    assert (status["restarts"], status["lastFailure"]["reason"]) == (0, "NodeTerminating")
    assert {"NodeTerminating", "PodReplaced"} <= set(job.events())


def test_a_drain_ends_where_the_job_has_no_pod_to_spare_and_training_has_all_its_nodes_meanwhile(
    submit: Submit, follow: Follow, kube: Kube, cluster_dir: Path, namespace: str
) -> None:
    job = submit(stateful("drained", replicas=2))
    book = follow(job)
    book.wait_step(20, timeout=120)

    def refuses(budget: Json) -> bool:
        return bool(budget.get("status", {}).get("currentHealthy") == budget["spec"]["minAvailable"] == 2)

    def settled(status: Json) -> bool:
        return "cordonSpares" not in status and status["worldSize"] == status["replicas"] == 2

    kube.wait("poddisruptionbudgets", job.name, namespace, refuses, timeout=60, what="a budget that lets no pod go")
    machine = job.node_of("drained-1-0")
    stay = [] if job.node_of("drained-0-0") == machine else ["drained-0-0"]
    drain = ["drain", machine, f"--pod-selector={job.workers}", "--force", "--ignore-daemonsets"]
    try:
        print(kubectl(cluster_dir, *drain, "--delete-emptydir-data", timeout=180))
        status = wait_for(job, settled, "the job has its own pods again")
    finally:
        kubectl(cluster_dir, "uncordon", machine)
    book.wait_steps_after(time.time(), world=2, timeout=60)
    assert machine not in {pod["spec"]["nodeName"] for pod in job.pods()}
    assert status["restarts"] == 0
    for pod in stay:
        assert_none_lost(book, pod)
    assert "NodeCordoned" in job.events()
