"""`elasticjob drain`: let one worker pod leave in good order; the job replaces it and loses no step."""

from __future__ import annotations

import time

from elasticjob._runtime.contract.names import Label, Role
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import POD_LIST
from elasticjob.cli.objects.jobs import is_true
from elasticjob.cli.objects.waiting import NotAsWantedError, wait_for_job
from elasticjob.cli.views.output import VerbOutput

POLL_SECONDS = 0.5
_TOO_MANY_REQUESTS = 429


def drain_pod(cluster: Cluster, output: VerbOutput, name: str, *, force: bool, wait_seconds: float | None) -> int:
    """Evict a worker pod; return the exit code.

    `force`: delete the pod, which no PodDisruptionBudget holds up. `wait_seconds`: how long to wait until the pod has
    ended and the job trains at full size again; None: not at all.
    """
    pod = cluster.get(POD_LIST, name)
    labels = pod["metadata"].get("labels", {})
    job = labels.get(Label.JOB_NAME)
    if not job or labels.get(Label.ROLE) != Role.WORKER.value:
        raise ClusterError(f"pod {name} is no worker pod of a job: elasticjob status JOB shows them")
    if force:
        cluster.delete(POD_LIST, name)
    else:
        _evict(cluster, name, job)
    node = pod.get("spec", {}).get("nodeName", "-")
    output.line(
        f"{name} leaves Node {node}: the round ends after a step that all ranks make, and {job} replaces the pod"
    )
    if wait_seconds is not None:
        deadline = time.monotonic() + wait_seconds
        _wait_until_gone(cluster, name, deadline, wait_seconds)
        what = f"{job} trains at full size without {name}"
        left = max(0.1, deadline - time.monotonic())
        wait_for_job(cluster, output, job, lambda j: is_true(j, "FullyScaled"), what=what, seconds=left)
        output.line(what)
    return 0


def _evict(cluster: Cluster, name: str, job: str) -> None:
    metadata = {"name": name, "namespace": cluster.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    try:
        cluster.create(POD_LIST, body, name, "eviction")
    except RefusedError as error:
        if error.status != _TOO_MANY_REQUESTS:
            raise
        raise ClusterError(
            f"{job} has no pod to spare: its PodDisruptionBudget keeps minReplicas Ready pods. Scale it up, wait until"
            f" all pods are Ready, or use --force"
        ) from None


def _wait_until_gone(cluster: Cluster, name: str, deadline: float, seconds: float) -> None:
    while time.monotonic() < deadline:
        try:
            cluster.get(POD_LIST, name)
        except RefusedError as error:
            if error.not_found:
                return
            raise
        time.sleep(POLL_SECONDS)
    raise NotAsWantedError(f"not within {seconds:g} s: pod {name} has ended")
