"""`make bench-cluster-queues`: a job gives a step to a more urgent job, in a queue of the real Kueue.

One job trains on four pods; two of them are steps. Several times an urgent job of one pod takes the quota of one of
them, and ends once the job trains on three pods.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise

from benchmarks import machine, report
from benchmarks.row import OURS, Sample
from benchmarks.run import exit_on_sigterm, save_cluster_row
from benchmarks.stage import NAMESPACE, prepare
from support.cluster.jobs import Job
from support.cluster.kube import Kube
from support.cluster.logbook import LogBook
from support.cluster.steps import elastic_job, queues, take_a_step, urgent_job

PODS, TIMES = 4, 5
QUEUE, NAME, URGENT = "team", "elastic", "urgent"
SETTLE = 20
"""Steps of training before a step is taken, and after it."""
ROWS = {
    "step-gone": "step of a job evicted by its queue: its pod is gone",
    "step-admitted": "step of a job evicted by its queue: the urgent job is admitted after that",
    "step-pause": "step of a job evicted by its queue: longest pause between steps of training",
}
TARGETS = {"step-gone": 3.0, "step-admitted": None, "step-pause": None}


def take(kube: Kube, job: Job, book: LogBook) -> dict[str, Sample]:
    """Take one step and give it back; return the sample of each row."""
    before = book.wait_steps_after(time.time(), world=PODS, timeout=180)
    book.wait_step(before.step + SETTLE, timeout=120)
    begin = book.steps[-1].time
    urgent = urgent_job(URGENT, QUEUE)
    taken = take_a_step(job, lambda: kube.create("elasticjobs", urgent, NAMESPACE), URGENT, PODS - 1)
    after = book.wait_steps_after(time.time(), world=PODS - 1, timeout=90)
    book.wait_step(after.step + SETTLE, timeout=120)
    times = sorted(step.time for step in book.steps if step.time >= begin)
    pause = max(later - earlier for earlier, later in pairwise(times))
    kube.delete("elasticjobs", URGENT, NAMESPACE)
    kube.wait_gone("workloads", NAMESPACE, f"elasticjob.dev/job-name={URGENT}", timeout=90)
    return {"step-gone": Sample(taken.gone), "step-admitted": Sample(taken.admitted), "step-pause": Sample(pause)}


def main() -> int:
    exit_on_sigterm()
    description, start = machine.describe(), time.monotonic()
    kube, folder = prepare()
    kube.recreate_namespace(NAMESPACE)
    samples: dict[str, list[Sample]] = {name: [] for name in ROWS}
    with queues(kube, folder, NAMESPACE, [QUEUE], PODS), LogBook(kube, NAMESPACE, NAME) as book:
        kube.create("elasticjobs", elastic_job(NAME, QUEUE, PODS - 2, PODS), NAMESPACE)
        job = Job(kube, NAMESPACE, NAME)
        for _ in range(TIMES):
            for name, sample in take(kube, job, book).items():
                samples[name].append(sample)
            print(f"  {', '.join(f'{name}: {found[-1].value:.2f} s' for name, found in samples.items())}", flush=True)
        made = {step.step for step in book.steps}
        if made != set(range(min(made), max(made) + 1)) or job.status()["restarts"]:
            raise AssertionError("a step of training was lost, or a restart was counted")
    for name, found in samples.items():
        took = time.monotonic() - start
        save_cluster_row(name, ROWS[name], TARGETS[name], {OURS: found}, description, took, "make bench-cluster-queues")
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
