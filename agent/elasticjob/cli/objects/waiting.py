"""Wait until a job is as wanted, and say what happens meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import GONE, ClusterError, NotReachableError, RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_condition, job_status
from elasticjob.cli.views.output import VerbOutput

RETRY_AFTER_SECONDS = 1.0
_TOLD = ("Suspended", "Running", "FullyScaled")
"""Conditions that say how far the job is."""


class NotAsWantedError(ClusterError):
    """The job did not become as wanted in time, or it has ended."""


class NotInTimeError(NotAsWantedError):
    """The job did not become as wanted in time."""


def wait_for_job(
    cluster: Cluster, output: VerbOutput, name: str, done: Callable[[KubeObject], bool], *, what: str, seconds: float
) -> None:
    """Return once the operator has seen the job's present spec and `done` holds.

    `what`: what is waited for, in words. NotAsWantedError: not within so many seconds, or the job has ended.
    """
    deadline, told = time.monotonic() + seconds, ""
    for job in _versions(cluster, name, deadline):
        if (now := describe_job(job)) != told:
            told = now
            output.note(f"  {now}")
        if job_status(job).get("observedGeneration", 0) >= job["metadata"].get("generation", 0) and done(job):
            return
        if has_finished(job):
            raise NotAsWantedError(f"{name} has ended before {what}")
    raise NotInTimeError(f"not within {seconds:g} s: {what}; elasticjob why {name}")


def _versions(cluster: Cluster, name: str, deadline: float) -> Iterator[KubeObject]:
    """Yield the job as it is, and then after each change, until the deadline. RefusedError: it was deleted."""
    fields = f"metadata.name={name}"
    while (left := deadline - time.monotonic()) > 0:
        try:
            job = cluster.get(ELASTICJOBS, name)
            yield job
            version = str(job["metadata"].get("resourceVersion", ""))
            for kind, changed in cluster.watch(ELASTICJOBS, fields=fields, version=version, seconds=min(left, 60.0)):
                if kind == "DELETED":
                    raise NotAsWantedError(f"{name} was deleted")
                yield changed
        except NotReachableError:
            time.sleep(RETRY_AFTER_SECONDS)  # the API server restarts; the deadline still is_true
        except RefusedError as error:
            if error.status != GONE:
                raise


def describe_job(job: KubeObject) -> str:
    """Return how far a job is in one line."""
    kind = next((k for k in _TOLD if job_condition(job, k) and (k == "Suspended") == is_true(job, "Suspended")), "")
    if is_true(job, "Running") and not is_true(job, "Suspended"):
        kind = "FullyScaled"
    message = " ".join(str(job_condition(job, kind).get("message", "")).split()).removeprefix("starting: ")
    return f"{job_status(job).get('phase') or 'no status'}{': ' if message else ''}{message}"
