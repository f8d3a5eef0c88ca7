"""Jobs in queues of the real Kueue, which Kueue admits, preempts and moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster import kueue as real
from support.cluster.install import install
from support.cluster.jobs import Job, manifest
from support.cluster.kube import ApiError, Json, Kube, condition, is_true

pytestmark = pytest.mark.alone

Submit = Callable[[Json], Job]
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
CPU = 50
"""Thousandths of a CPU that a worker pod requests."""


@pytest.fixture(scope="module")
def kueue(kube: Kube, cluster_dir: Path) -> Iterator[None]:
    """Kueue, a flavor and a priority class, and an operator that requires a queue; all of it is undone in the end."""
    with real.installed(kube, cluster_dir):
        try:
            kube.create("resourceflavors", real.flavor("linux"))
            kube.create("workloadpriorityclasses", real.priority_class("urgent", 100))
            install(kube, cluster_dir, "kueue.enabled=true", "kueue.requireQueue=true")
            yield
        finally:
            install(kube, cluster_dir)


@pytest.fixture
def queues(kueue: None, kube: Kube, namespace: str) -> Iterator[Callable[..., str]]:
    """Make a LocalQueue with a ClusterQueue of its own, which has quota for so many worker pods; return its name."""
    made: list[str] = []

    def make(name: str, pods: int, flavor: str = "linux") -> str:
        whole = f"{namespace[:40]}-{namespace[-5:]}-{name}"
        kube.create("clusterqueues", real.cluster_queue(whole, f"{pods * CPU}m", flavor))
        made.append(whole)
        kube.create("localqueues", real.local_queue(name, whole), namespace)
        return whole

    yield make
    for job in kube.list("elasticjobs", namespace):
        kube.delete("elasticjobs", job["metadata"]["name"], namespace)
    for name in made:
        kube.delete("clusterqueues", name)


def queued(name: str, queue: str, shared_dir: str, least: int, most: int, **labels: str) -> Json:
    """Return a job of a queue, which trains until `end(name)`."""
    script = f"import os, time\nwhile not os.path.exists('/shared/end-{name}'): time.sleep(0.1)"
    body = manifest(
        name,
        ["python3", "-c", script],
        preload=[],
        mounts=[{"name": "shared", "mountPath": "/shared"}],
        volumes=[{"name": "shared", "hostPath": {"path": shared_dir, "type": "Directory"}}],
        replicas=most,
        elasticPolicy={"minReplicas": least, "maxReplicas": most},
        resources={"requests": {"cpu": f"{CPU}m", "memory": "256Mi"}},
    )
    body["metadata"]["labels"] = {QUEUE: queue, **labels}
    return body


def workload(job: Job, until: Callable[[Json], bool], what: str) -> Json:
    """Wait until the Workload of a job is as `until` says, and return it."""
    some = lambda found: any(map(until, found))  # noqa: E731
    found = job.kube.wait_list("workloads", job.namespace, some, selector=job.selector, timeout=60, what=what)
    return next(filter(until, found))


def wait_used(kube: Kube, queue: str, pods: int) -> None:
    """Wait until the quota of so many worker pods of a ClusterQueue is used."""
    used = {"0"} if not pods else {f"{pods * CPU}m"}
    what = f"{queue}: the quota of {pods} pods is used"
    kube.wait("clusterqueues", queue, None, lambda found: real.used_cpu(found) in used, timeout=60, what=what)


def test_a_job_is_admitted_in_part_preempted_admitted_again_shrinks_and_ends(
    queues: Callable[..., str], submit: Submit, kube: Kube, namespace: str, shared_dir: str
) -> None:
    whole = queues("team-a", pods=2)
    job = submit(queued("elastic", "team-a", shared_dir, least=2, most=3))
    status = job.wait_world(2, after=0, timeout=90)
    assert status["targetReplicas"] == 2
    assert condition(job.read(), "FullyScaled")["reason"] == "InsufficientCapacity"
    asked = workload(job, lambda found: is_true(found, "PodsReady"), "the Workload says that the job trains")
    (pods,) = asked["spec"]["podSets"]
    assert (pods["name"], pods["count"], pods["minCount"]) == ("worker", 3, 2)
    assert kube.get("pods", "elastic-0-0", namespace)["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}

    # A job waits, until it gets a priority class: then Kueue preempts the other one.
    other = submit(queued("other", "team-a", shared_dir, least=2, most=2))
    workload(other, lambda found: condition(found, "QuotaReserved").get("status") == "False", "Kueue says why it waits")
    assert other.wait("Suspended", reason="SuspendedByQueue")
    kube.patch("elasticjobs", "other", {"metadata": {"labels": {PRIORITY: "urgent"}}}, namespace)
    other.wait_world(2, after=0, timeout=90)
    evicted = workload(job, lambda found: is_true(found, "Evicted"), "the Workload is evicted")
    expected = {"Evicted": "Preempted", "QuotaReserved": "Pending", "Requeued": "Preempted"}
    assert {kind: condition(evicted, kind)["reason"] for kind in expected} == expected
    assert "admission" not in evicted["status"]
    assert kube.list("pods", namespace, job.workers) == []
    assert condition(job.read(), "Suspended")["reason"] == "SuspendedByQueue"

    # It returns when the other one has ended: now there is quota for all of its pods.
    bigger = real.cluster_queue(whole, f"{3 * CPU}m", "linux")
    kube.patch("clusterqueues", whole, {"spec": bigger["spec"]})
    (Path(shared_dir) / "end-other").touch()
    other.wait("Complete", timeout=60)
    status = job.wait_world(3, after=status["rendezvousRound"], timeout=90)
    assert (status["executionAttempts"], status["restarts"]) == (2, 0)
    kube.scale("elastic", namespace, 2)
    wait_used(kube, whole, 2)

    (Path(shared_dir) / "end-elastic").touch()
    job.wait("Complete", timeout=60)
    finished = workload(job, lambda found: is_true(found, "Finished"), "the Workload is Finished")
    assert condition(finished, "Finished")["reason"] == "Succeeded"
    wait_used(kube, whole, 0)
    assert "nodeSelector" not in job.read()["spec"]["template"]["spec"]


def test_a_job_admitted_in_part_gives_quota_back_and_moves_to_another_queue_but_may_not_leave_it(
    queues: Callable[..., str], submit: Submit, kube: Kube, namespace: str, shared_dir: str
) -> None:
    first, second = queues("first", pods=2), queues("second", pods=2)
    job = submit(queued("moves", "first", shared_dir, least=1, most=3))
    status = job.wait_world(2, after=0, timeout=90)
    kube.scale("moves", namespace, 1)
    status = job.wait_world(1, after=status["rendezvousRound"], timeout=90)
    wait_used(kube, first, 1)
    with pytest.raises(ApiError, match="requires a queue"):
        kube.patch("elasticjobs", "moves", {"metadata": {"labels": {QUEUE: None}}}, namespace)
    kube.patch("elasticjobs", "moves", {"metadata": {"labels": {QUEUE: "second"}}}, namespace)
    status = job.wait_world(1, after=status["rendezvousRound"], timeout=90)
    assert status["executionAttempts"] == 2
    wait_used(kube, first, 0)
    wait_used(kube, second, 1)


def test_the_quota_of_a_resizable_job_follows_its_replicas(
    queues: Callable[..., str], submit: Submit, kube: Kube, namespace: str, shared_dir: str
) -> None:
    whole = queues("team-a", pods=3)
    body = queued("slices", "team-a", shared_dir, least=1, most=3)
    body["metadata"]["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    body["spec"]["replicas"] = 1
    job = submit(body)
    status = job.wait_world(1, after=0, timeout=90)
    wait_used(kube, whole, 1)
    kube.scale("slices", namespace, 3)
    status = job.wait_world(3, after=status["rendezvousRound"], timeout=90)
    wait_used(kube, whole, 3)
    kube.scale("slices", namespace, 2)
    status = job.wait_world(2, after=status["rendezvousRound"], timeout=90)
    wait_used(kube, whole, 2)
    assert status["executionAttempts"] == 1


def test_a_job_whose_admission_assigns_a_topology_says_that_it_cannot_start(
    queues: Callable[..., str], submit: Submit, kube: Kube, shared_dir: str
) -> None:
    levels = [{"nodeLabel": "kubernetes.io/hostname"}]
    body = {"apiVersion": real.API, "kind": "Topology", "metadata": {"name": "hosts"}, "spec": {"levels": levels}}
    kube.create("topologies", body)
    kube.create("resourceflavors", real.flavor("placed", topologyName="hosts"))
    queues("placed", pods=2, flavor="placed")
    job = submit(queued("placed", "placed", shared_dir, least=1, most=2))
    workload(job, lambda found: is_true(found, "QuotaReserved"), "the job has quota")

    def says(found: Json) -> bool:
        return "topology" in condition(found, "Suspended").get("message", "")

    kube.wait("elasticjobs", "placed", job.namespace, says, timeout=60, what="the job names the topology")
    assert kube.list("pods", job.namespace, job.workers) == []
