"""A job in a queue of the real Kueue gives some of its pods up to more urgent jobs, and gets them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from cluster.waiting import until
from support.cluster import kueue as real
from support.cluster.install import install
from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube, Objects, condition, is_true
from support.cluster.logbook import LogBook
from support.docs.blocks import all_blocks

pytestmark = pytest.mark.alone

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
STEPS = "elasticjob.dev/step-priority-class"
CPU, QUOTA = 50, 4
"""Thousandths of a CPU that a worker pod requests; for how many pods the queue has quota."""
PAGE = "docs/operate/kueue.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "state" / "train.py"
RESOURCES = {"requests": {"cpu": f"{CPU}m", "memory": "256Mi"}}


@pytest.fixture
def queue(kube: Kube, cluster_dir: Path, namespace: str) -> Iterator[Json]:
    """Kueue with a queue `team` for QUOTA pods, and an operator that uses it; the labels of a job in that queue."""
    with real.installed(kube, cluster_dir):
        try:
            kube.create("resourceflavors", real.flavor("linux"))
            kube.create("workloadpriorityclasses", real.priority_class("urgent", 100))
            kube.create("workloadpriorityclasses", class_on_page())
            kube.create("clusterqueues", real.cluster_queue("team", f"{QUOTA * CPU}m", "linux"))
            kube.create("localqueues", real.local_queue("team", "team"), namespace)
            install(kube, cluster_dir, "kueue.enabled=true")
            yield {"kueue.x-k8s.io/queue-name": "team"}
            for job in kube.list("elasticjobs", namespace):
                kube.delete("elasticjobs", job["metadata"]["name"], namespace)
        finally:
            install(kube, cluster_dir)


def class_on_page() -> Json:
    """Return the priority class of steps that docs/operate/kueue.md shows."""
    blocks = (yaml.safe_load(b.text) for b in all_blocks() if b.page == PAGE and b.language == "yaml")
    return next(found for found in blocks if found.get("kind") == "WorkloadPriorityClass")


def shrinking(labels: Json) -> Json:
    """Return a job that trains on 2 to 4 pods; each above 2 is a step."""
    command = ["python3", "-c", EXAMPLE.read_text(), "--step-delay=0.05", "--steps=1000000"]
    policy = {"minReplicas": 2, "maxReplicas": 4}
    body = manifest("shrinks", command, elasticPolicy=policy, replicas=4, resources=RESOURCES)
    body["metadata"] |= {"labels": labels, "annotations": {STEPS: "elastic-steps"}}
    return body


def urgent(name: str, labels: Json, shared_dir: str) -> Json:
    """Return an urgent job of one pod, which runs until the file `end` exists."""
    script = "import os, time\nwhile not os.path.exists('/shared/end'): time.sleep(0.1)"
    body = manifest(
        name,
        ["python3", "-c", script],
        preload=[],
        mounts=[{"name": "shared", "mountPath": "/shared"}],
        volumes=[{"name": "shared", "hostPath": {"path": shared_dir, "type": "Directory"}}],
        replicas=1,
        elasticPolicy={"minReplicas": 1, "maxReplicas": 1},
        resources=RESOURCES,
    )
    body["metadata"]["labels"] = {**labels, "kueue.x-k8s.io/priority-class": "urgent"}
    return body


def wait_used(kube: Kube, pods: int) -> None:
    """Wait until the quota of so many pods is used."""
    used = {"0"} if not pods else {f"{pods * CPU}m"}
    what = f"the quota of {pods} pods is used"
    kube.wait("clusterqueues", "team", None, lambda found: real.used_cpu(found) in used, timeout=60, what=what)


def holds(workload: Json) -> int:
    """Return for how many pods a Workload has quota."""
    count = int(workload["spec"]["podSets"][0]["count"])
    return count if is_true(workload, "QuotaReserved") and not is_true(workload, "Finished") else 0


def uses(pod: Json) -> int:
    return int(pod["status"].get("phase") not in ("Succeeded", "Failed"))


@dataclass
class Balance:
    """All changes of a job's pods and of its quota, as the API server delivers them."""

    job: Job
    since: str
    """A version of the cluster from before the job had any pod or Workload."""
    changes: list[tuple[int, str, str, int]] = field(default_factory=list)
    """Version, kind and name of an object, and how many pods it is or has quota for from then on."""

    def __post_init__(self) -> None:
        for plural, selector, weigh in (("workloads", self.job.selector, holds), ("pods", self.job.workers, uses)):
            threading.Thread(target=self._follow, args=(plural, selector, weigh), daemon=True).start()

    def _follow(self, plural: str, selector: str, weigh: Callable[[Json], int]) -> None:
        events = self.job.kube.watch(plural, self.job.namespace, selector=selector, since=self.since, timeout=300)
        for kind, found in events:
            meta, number = found["metadata"], 0 if kind == "DELETED" else weigh(found)
            self.changes.append((int(meta["resourceVersion"]), plural, meta["name"], number))

    def assert_kept(self, pods: int) -> None:
        """Assert that the job had no more pods than quota after any change; in the end it has so many of both."""

        def problem() -> str | None:
            last = self._replay()[-1:]
            return None if last == [(pods, pods)] else f"the last change left (pods, quota) {last}"

        until("all changes", problem, timeout=10)
        assert all(used <= held for used, held in self._replay()), sorted(self.changes)

    def _replay(self) -> list[tuple[int, int]]:
        """Return how many pods there were, and for how many there was quota, after each change."""
        now: dict[tuple[str, str], int] = {}
        found = []
        for _, plural, name, number in sorted(self.changes):
            now[plural, name] = number
            used, held = (sum(n for (of, _), n in now.items() if of == kind) for kind in ("pods", "workloads"))
            found.append((used, held))
        return found


def is_evicted(found: Objects) -> bool:
    return any(is_true(workload, "Evicted") and holds(workload) for workload in found)


def take_a_step(job: Job, other: Json, submit: Submit, pods: int) -> None:
    """Submit an urgent job of one pod, wait until the job has so many pods left, and print how long that takes."""
    kube, begin = job.kube, time.monotonic()
    submit(other)
    kube.wait_list("workloads", job.namespace, is_evicted, selector=job.selector, timeout=30, what="a step is evicted")
    evicted = time.monotonic()
    fewer = lambda found: sum(map(uses, found)) == pods  # noqa: E731
    kube.wait_list("pods", job.namespace, fewer, selector=job.workers, timeout=60, what=f"{pods} pods are left")
    gone = time.monotonic()
    name = other["metadata"]["name"]
    admitted = lambda found: any(is_true(workload, "Admitted") for workload in found)  # noqa: E731
    kube.wait_list(
        "workloads", job.namespace, admitted,
        selector=f"elasticjob.dev/job-name={name}", timeout=30, what=f"{name} is admitted",
    )  # fmt: skip
    print(
        f"{name}: step evicted {evicted - begin:.2f} s after it was submitted, pods gone {gone - evicted:.2f} s later, "
        f"admitted {time.monotonic() - gone:.2f} s after that",
        flush=True,
    )


def assert_none_lost(book: LogBook, pod: str) -> None:
    """Assert that a pod that ran all the time made every step once."""
    steps = [s.step for s in book.steps if s.pod == pod]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_a_job_gives_its_steps_to_more_urgent_jobs_and_grows_back(
    queue: Json, submit: Submit, follow: Follow, kube: Kube, namespace: str, shared_dir: str
) -> None:
    since = kube.get("localqueues", "team", namespace)["metadata"]["resourceVersion"]
    job = submit(shrinking(queue))
    balance, book = Balance(job, since), follow(job)
    book.wait_steps_after(time.time(), world=4, timeout=120)
    wait_used(kube, 4)

    take_a_step(job, urgent("first", queue, shared_dir), submit, pods=3)
    book.wait_steps_after(time.time(), world=3, timeout=60)
    take_a_step(job, urgent("second", queue, shared_dir), submit, pods=2)
    book.wait_steps_after(time.time(), world=2, timeout=60)
    found = job.wait("FullyScaled", status="False", reason="InsufficientCapacity", timeout=30)
    assert "queue team has quota for 2 of 4 pods: Workload " in condition(found, "FullyScaled")["message"]
    wait_used(kube, 4)

    (Path(shared_dir) / "end").touch()
    book.wait_steps_after(time.time(), world=4, timeout=90)
    job.wait("FullyScaled", reason="AtDesiredReplicas", timeout=30)
    wait_used(kube, 4)
    status = job.status()
    assert (status["executionAttempts"], status["restarts"], status["restartsCountTowardsMax"]) == (1, 0, 0)
    for pod in ("shrinks-0-0", "shrinks-1-0"):
        assert_none_lost(book, pod)
    made = {step.step for step in book.steps}
    assert made == set(range(1, max(made) + 1))
    balance.assert_kept(4)
