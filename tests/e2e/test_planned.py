"""Planned ends on the real cluster: scaling and drains lose no step of a script that uses elasticjob.State."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from elasticjob_operator.model.cluster.evictions import own_report
from support.cluster.evictions import asking_status, eviction_of, finished_status
from support.cluster.install import install
from support.cluster.jobs import DIGITS, ROOM, Job, kubectl, manifest
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
CYCLES = int(os.environ.get("CYCLES", "2"))
"""How often a job yields its room and grows back; `make yields` sets it."""
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
    book.wait_steps_after(moment, world=3, incarnation=1, timeout=120)
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


def yield_room(job: Job, urgent: Json) -> float:
    """Create the urgent pod, and return when a worker pod has made room for it, by this machine's clock."""
    events = job.kube.watch("pods", job.namespace, selector=job.workers, timeout=60)
    next(events)  # it is connected
    job.kube.create("pods", urgent, job.namespace)
    for kind, _ in events:
        if kind == "DELETED":
            return time.time()
    raise AssertionError("no pod made room within 60 s")


@pytest.mark.takes_turns("room")
@pytest.mark.timeout(120 + 30 * CYCLES)
def test_a_job_yields_to_a_pod_of_higher_priority_and_grows_back(
    submit: Submit, follow: Follow, kube: Kube, namespace: str, urgent: Json,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    job = submit(stateful("yielding", replicas=3, resources=ROOM))
    book = follow(job)
    freed: list[float] = []
    for cycle in range(CYCLES):
        job.wait_status(worldSize=3)
        book.wait_steps_after(time.time(), world=3, timeout=120)
        moment = yield_room(job, urgent)
        book.wait_steps_after(moment, world=2, timeout=60)
        freed.append(moment - max(s.time for s in book.steps if s.world == 3))
        print(f"cycle {cycle + 1}: the room was free {freed[-1]:.2f} s after the last step", flush=True)
        running = lambda pod: pod["status"].get("phase") == "Running"  # noqa: E731
        kube.wait("pods", "urgent", namespace, running, timeout=60, what="the urgent pod runs")
        kube.delete("pods", "urgent", namespace, grace=0)
        for pod in {step.pod for step in book.steps}:
            assert_none_lost(book, pod)
    print(f"median {median(freed):.2f} s, longest {max(freed):.2f} s (goal: 1 s)", flush=True)
    record_property("room free after the last step", [round(seconds, 2) for seconds in freed])
    job.wait_status(worldSize=3)
    job.wait_standby_store(timeout=60)
    newest, pods = book.wait_steps_after(time.time(), world=3, timeout=60).step, set(job.running())
    all_made = lambda: pods <= {step.pod for step in book.steps if step.step >= newest}  # noqa: E731
    book.wait(all_made, timeout=60, what=f"step {newest} of all pods")
    for pod in {step.pod for step in book.steps}:
        assert_none_lost(book, pod)
    made = {step.step for step in book.steps}
    assert made == set(range(1, max(made) + 1))
    status = job.status()
    assert (status["restarts"], status["restartsCountTowardsMax"]) == (0, 0)
    assert len(kube.list("pods", namespace)) == len(job.pods()) + len(job.pods(job.stores)) == 3 + 2
    kube.delete("elasticjobs", job.name, namespace)
    for plural in ("pods", "services", "secrets", "poddisruptionbudgets", "networkpolicies"):
        kube.wait_gone(plural, namespace, job.selector, timeout=60)


def wait_for(job: Job, until: Callable[[Json], bool], what: str) -> Json:
    """Wait until the job's status meets the condition, and return the status."""
    found = job.kube.wait(
        "elasticjobs", job.name, job.namespace, lambda current: until(current.get("status", {})), timeout=120, what=what
    )
    status: Json = found["status"]
    return status


def machines(pods: list[Json]) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in pods}


@pytest.mark.alone
def test_pods_leave_a_machine_whose_end_is_announced_and_lose_no_step(
    submit: Submit, follow: Follow, kube: Kube
) -> None:
    job = submit(stateful("noticed", replicas=3))
    book = follow(job)
    book.wait_step(20, timeout=120)
    machine = job.node_of("noticed-2-0")
    stay = [pod for pod in ("noticed-0-0", "noticed-1-0") if job.node_of(pod) != machine]
    before = job.wait_status(worldSize=3)["status"]["rendezvousRound"]
    kube.patch("nodes", machine, {"metadata": {"annotations": {"elasticjob.dev/terminating": "test"}}})
    try:
        left = lambda pods: machine not in machines(pods)  # noqa: E731
        job.wait_pods(left, job.selector, timeout=120, what=f"no pod, nor store, is on {machine}")
        status = job.wait_world(3, after=before, timeout=120)
        book.wait_steps_after(time.time(), world=3, timeout=60)
        assert machine not in machines(job.pods(job.selector))
    finally:
        kube.patch("nodes", machine, {"metadata": {"annotations": {"elasticjob.dev/terminating": None}}})
    for pod in stay:
        assert_none_lost(book, pod)
    assert (status["restarts"], status["lastFailure"]["reason"]) == (0, "NodeTerminating")
    job.wait_events("NodeTerminating", "PodReplaced")


@pytest.mark.alone
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
    assert machine not in machines(job.pods())
    assert status["restarts"] == 0
    for pod in stay:
        assert_none_lost(book, pod)
    job.wait_events("NodeCordoned")


@pytest.fixture
def answering(kube: Kube, cluster_dir: Path) -> Iterator[None]:
    """An operator that answers Evictions."""
    try:
        install(kube, cluster_dir, "evictionRequests.enabled=true")
        yield
    finally:
        install(kube, cluster_dir)


@pytest.mark.alone
@pytest.mark.needs_gate("EvictionRequestAPI")
def test_a_pod_that_an_eviction_asks_to_leave_hands_over_and_no_step_is_lost(
    answering: None, submit: Submit, follow: Follow, kube: Kube, namespace: str
) -> None:
    job = submit(stateful("asked", replicas=2))
    book = follow(job)
    book.wait_step(20, timeout=120)
    asked = kube.get("pods", "asked-1-0", namespace)
    kube.create("evictions", eviction_of(asked), namespace)
    kube.patch("evictions", "asked-1-0", {"status": asking_status(asked)}, namespace, "/status")

    def completed(eviction: Json) -> bool:
        return "completionTime" in own_report(eviction)

    done = kube.wait("evictions", "asked-1-0", namespace, completed, timeout=120, what="the operator is done")
    left = kube.find("pods", "asked-1-0", namespace)
    assert left is None or left["status"]["phase"] in ("Succeeded", "Failed"), "the kubelet may not have deleted it yet"
    kube.patch("evictions", "asked-1-0", {"status": finished_status(done)}, namespace, "/status")

    def settled(status: Json) -> bool:
        return "cordonSpares" not in status and status["worldSize"] == status["replicas"] == 2

    status = wait_for(job, settled, "the job has its own pods again")
    book.wait_steps_after(time.time(), world=2, timeout=60)
    assert_none_lost(book, "asked-0-0")
    assert (status["restarts"], status["lastFailure"]["reason"]) == (0, "EvictionRequested")
    job.wait_events("EvictionRequested", "NodeCordoned", "PodReplaced")
