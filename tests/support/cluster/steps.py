"""Jobs with steps in a queue of the real Kueue, and what holds after every change of their pods and their quota."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from cluster.waiting import until
from support.cluster import kueue as real
from support.cluster.install import install
from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube, Objects, condition, is_true
from support.cluster.logbook import LogBook

STEPS = "elasticjob.dev/step-priority-class"
CPU = 50
"""Thousandths of a CPU that a worker pod requests."""
RESOURCES = {"requests": {"cpu": f"{CPU}m", "memory": "256Mi"}}
EXAMPLE = Path(__file__).parents[3] / "examples" / "state" / "train.py"
URGENT = real.priority_class("urgent", 100)


STEP_CLASS = real.priority_class("elastic-steps", -1)


@contextmanager
def queues(
    kube: Kube, cluster_dir: Path, namespace: str, names: Sequence[str], pods: int, *, cohort: str = "",
    step_class: Json = STEP_CLASS,
) -> Iterator[str]:  # fmt: skip
    """Install Kueue with queues of these names, each with quota for so many pods, and let the operator use it.

    Return a version of the cluster from before any job. In the end the jobs and Workloads of the namespace are deleted.
    `cohort`, if any: the queues lend each other what they do not use.
    """
    with real.installed(kube, cluster_dir):
        try:
            kube.create("resourceflavors", real.flavor("linux"))
            for priority in (URGENT, step_class):
                kube.create("workloadpriorityclasses", priority)
            for name in names:
                kube.create("clusterqueues", real.cluster_queue(name, quota(pods), "linux", cohort))
                made = kube.create("localqueues", real.local_queue(name, name), namespace)
            install(kube, cluster_dir, "kueue.enabled=true")
            yield made["metadata"]["resourceVersion"]
        finally:
            for plural in ("elasticjobs", "workloads"):
                for found in kube.list(plural, namespace):
                    kube.delete(plural, found["metadata"]["name"], namespace)
            install(kube, cluster_dir)


def wait_admitted(kube: Kube, namespace: str, job: str) -> None:
    """Wait until Kueue has admitted a Workload of the job."""
    admitted = lambda found: any(is_true(workload, "Admitted") for workload in found)  # noqa: E731
    selector = f"elasticjob.dev/job-name={job}"
    kube.wait_list("workloads", namespace, admitted, selector=selector, timeout=90, what=f"{job} is admitted")


def quota(pods: int) -> str:
    """Return the CPU of so many worker pods, as a ClusterQueue has it."""
    return f"{pods * CPU}m"


def elastic_job(name: str, queue: str, low: int, high: int) -> Json:
    """Return a job that trains on `low` to `high` pods until it is deleted; each above `low` is a step."""
    command = ["python3", "-c", EXAMPLE.read_text(), "--step-delay=0.05", "--steps=1000000"]
    policy = {"minReplicas": low, "maxReplicas": high}
    body = manifest(name, command, elasticPolicy=policy, replicas=high, resources=RESOURCES)
    labels = {"kueue.x-k8s.io/queue-name": queue}
    body["metadata"] |= {"labels": labels, "annotations": {STEPS: "elastic-steps"}}
    return body


def urgent_job(name: str, queue: str, command: Sequence[str] = ("sleep", "infinity"), **template: object) -> Json:
    """Return a job of one pod that is more urgent. `template`: volumes and mounts, as `manifest` takes them."""
    policy = {"minReplicas": 1, "maxReplicas": 1}
    body = manifest(
        name, list(command), preload=[], replicas=1, elasticPolicy=policy, resources=RESOURCES, **template
    )  # fmt: skip
    priority = {"kueue.x-k8s.io/priority-class": URGENT["metadata"]["name"]}
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue, **priority}
    return body


@dataclass(frozen=True)
class Taken:
    """How a step was taken from a job for an urgent one. Seconds, each from the moment before."""

    evicted: float
    """From the creation of the urgent job until Kueue has evicted a step."""
    gone: float
    """Until its pods are gone."""
    admitted: float
    """Until Kueue has admitted the urgent job."""


def take_a_step(job: Job, submit: Callable[[], object], urgent: str, pods: int) -> Taken:
    """Submit the urgent job of this name, and wait until Kueue has admitted it and `job` has so many pods left."""

    def is_evicted(found: Objects) -> bool:
        return any(is_true(workload, "Evicted") and holds(workload) for workload in found)

    def are_left(found: Objects) -> bool:
        return sum(map(uses, found)) == pods

    kube, begin = job.kube, time.monotonic()
    submit()
    kube.wait_list("workloads", job.namespace, is_evicted, selector=job.selector, timeout=90, what="a step is evicted")
    evicted = time.monotonic()
    kube.wait_list("pods", job.namespace, are_left, selector=job.workers, timeout=90, what=f"{pods} pods are left")
    gone = time.monotonic()
    wait_admitted(kube, job.namespace, urgent)
    return Taken(evicted - begin, gone - evicted, time.monotonic() - gone)


def holds(workload: Json) -> int:
    """Return for how many pods a Workload has quota."""
    count = int(workload["spec"]["podSets"][0]["count"])
    return count if is_true(workload, "QuotaReserved") and not is_true(workload, "Finished") else 0


def uses(pod: Json) -> int:
    """Return 1 for a pod that uses quota. Once all its containers have ended it uses none; its phase comes later."""
    containers = pod["status"].get("containerStatuses", [])
    has_ended = bool(containers) and all("terminated" in container["state"] for container in containers)
    return int(not has_ended and pod["status"].get("phase") not in ("Succeeded", "Failed"))


@dataclass
class Balance:
    """All changes of a job's pods and of its quota, as the API server delivers them."""

    job: Job
    since: str
    """A version of the cluster from before the job had any pod or Workload."""
    changes: list[tuple[int, str, str, int]] = field(default_factory=list)
    """Version, kind and name of an object, and how many pods it is or has quota for from then on."""
    evictions: set[tuple[str, str]] = field(default_factory=set)
    """Name of a Workload, and the time at which Kueue evicted it."""

    def __post_init__(self) -> None:
        for plural, selector, weigh in (("workloads", self.job.selector, holds), ("pods", self.job.workers, uses)):
            threading.Thread(target=self._follow, args=(plural, selector, weigh), daemon=True).start()

    def _follow(self, plural: str, selector: str, weigh: Callable[[Json], int]) -> None:
        events = self.job.kube.watch(plural, self.job.namespace, selector=selector, since=self.since, timeout=1800)
        for kind, found in events:
            meta, number = found["metadata"], 0 if kind == "DELETED" else weigh(found)
            self.changes.append((int(meta["resourceVersion"]), plural, meta["name"], number))
            if is_true(found, "Evicted"):
                self.evictions.add((meta["name"], condition(found, "Evicted")["lastTransitionTime"]))

    def assert_kept(self, pods: int, low: int = 0) -> None:
        """Assert that the job had no more pods than quota after any change, and no fewer than `low` once it had them.
        In the end it has quota for `pods`, and as many pods."""

        def problem() -> str | None:
            return None if self.last() == (pods, pods) else f"the last change left (pods, quota) {self.last()}"

        until("all changes", problem, timeout=60)
        assert all(used <= held for used, held in self._replay()), sorted(self.changes)
        begun = dropwhile(lambda pair: pair[0] < low, self._replay())
        assert all(used >= low for used, _ in begun), sorted(self.changes)

    def last(self) -> tuple[int, int]:
        """Return how many pods there are now, and for how many there is quota."""
        return self._replay()[-1] if self.changes else (0, 0)

    def _replay(self) -> list[tuple[int, int]]:
        """Return how many pods there were, and for how many there was quota, after each change."""
        now: dict[tuple[str, str], int] = {}
        found = []
        for _, plural, name, number in sorted(self.changes):
            now[plural, name] = number
            used, held = (sum(n for (of, _), n in now.items() if of == kind) for kind in ("pods", "workloads"))
            found.append((used, held))
        return found


def assert_none_lost(book: LogBook, pod: str) -> None:
    """Assert that a pod that ran all the time made every step once."""
    steps = [s.step for s in book.steps if s.pod == pod]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def assert_every_step(book: LogBook) -> None:
    """Assert that each step up to the last one was made."""
    made = {step.step for step in book.steps}
    assert made == set(range(1, max(made) + 1))
