"""`elasticjob suspend` and `resume`: end the pods of a job so that it can go on later."""

from __future__ import annotations

from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError
from elasticjob.cli.cluster.resources import ELASTICJOBS, KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_status
from elasticjob.cli.objects.waiting import wait_for_job
from elasticjob.cli.views.output import VerbOutput


def suspend_job(cluster: Cluster, output: VerbOutput, name: str, wait_seconds: float | None) -> int:
    """Suspend a job; return the exit code. `wait_seconds`: how long to wait until it has no pods; None: not at all."""
    already = _set_suspend(cluster, name, True)
    output.line(f"{name} was suspended already" if already else f"{name} is being suspended: its workers save and end")
    if wait_seconds is not None:
        what = f"{name} has no worker pods"
        wait_for_job(cluster, output, name, is_completely_suspended, what=what, seconds=wait_seconds)
        output.line(f"{what}; elasticjob resume {name} lets it go on")
    return 0


def resume_job(cluster: Cluster, output: VerbOutput, name: str, wait_seconds: float | None) -> int:
    """Resume a job; return the exit code. `wait_seconds`: how long to wait until it trains; None: not at all."""
    already = not _set_suspend(cluster, name, False)
    output.line(f"{name} was not suspended" if already else f"{name} is resumed: its next execution begins")
    if wait_seconds is not None:
        what = f"{name} trains"
        wait_for_job(cluster, output, name, lambda job: is_true(job, "Running"), what=what, seconds=wait_seconds)
        output.line(what)
    return 0


def is_completely_suspended(job: KubeObject) -> bool:
    """Return whether the job is suspended and all its worker pods have ended. Pure."""
    status = job_status(job)
    return is_true(job, "Suspended") and not status.get("replicas") and not status.get("terminating")


def _set_suspend(cluster: Cluster, name: str, suspend: bool) -> bool:
    """Write `spec.suspend` and return what it was."""
    job = cluster.get(ELASTICJOBS, name)
    if has_finished(job):
        raise ClusterError(f"{name} has ended: a finished job is neither suspended nor resumed")
    before = bool(job.get("spec", {}).get("suspend"))
    if before != suspend:
        cluster.patch(ELASTICJOBS, name, {"spec": {"suspend": suspend}})
    return before
