"""`elasticjob scale`: change how many worker pods a job trains on."""

from __future__ import annotations

from elasticjob._runtime.contract.text import with_noun
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_status, size_bounds, wanted_replicas
from elasticjob.cli.objects.waiting import wait_for_job
from elasticjob.cli.views.output import VerbOutput


def scale_job(cluster: Cluster, output: VerbOutput, name: str, replicas: int, wait_seconds: float | None) -> int:
    """Ask for so many worker pods; return the exit code. `wait_seconds`: how long to wait for them; None: do not."""
    job = cluster.get(ELASTICJOBS, name)
    if has_finished(job):
        raise ClusterError(f"{name} has ended: its size cannot change any more")
    try:
        cluster.patch(ELASTICJOBS, name, {"spec": {"replicas": replicas}}, "scale")
    except RefusedError as error:
        raise _with_hint(error, job, replicas) from None
    before = wanted_replicas(job)
    output.line(f"{name}: {with_noun(replicas, 'worker pod')} wanted, {before} before, {_active(job)} train now")
    if job.get("spec", {}).get("suspend"):
        output.line(f"{name} is suspended: the new size counts once it runs (elasticjob resume {name})")
    elif wait_seconds is not None:
        what = f"{with_noun(replicas, 'worker pod')} of {name} train"
        wait_for_job(cluster, output, name, lambda j: is_true(j, "FullyScaled"), what=what, seconds=wait_seconds)
        output.line(what)
    return 0


def _active(job: KubeObject) -> int:
    return int(job_status(job).get("active", 0))


def _with_hint(error: RefusedError, job: KubeObject, replicas: int) -> ClusterError:
    """Return the API server's refusal, with what would be accepted."""
    if error.status not in (403, 422):
        return error
    low, high = size_bounds(job)
    name = job["metadata"]["name"]
    if error.status == 422 and low == high:
        return ClusterError(
            f"{error}; the size of {name} is fixed: elasticjob suspend {name}, then scale and resume it"
        )
    if error.status == 422 and not low <= replicas <= high:
        return ClusterError(f"{name} has from {low} to {high} worker pods: change elasticPolicy to get {replicas}")
    return error
