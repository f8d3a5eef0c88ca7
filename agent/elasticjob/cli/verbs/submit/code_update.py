"""`elasticjob submit --update`: give a running job other code, without new pods.

Three writes, in this order: the ConfigMap, the pods, the job.
- A kubelet renews a mounted ConfigMap after up to 90 s, but at once if its pod changes. So each worker pod gets the
  digest as an annotation, which nobody reads. The pods that come later mount what the ConfigMap has then.
- The job's annotation goes through the operator to the coordinator, which ends the round by a plan and names the digest
  in the assignments of the next one. An agent starts its workers only with that code.
"""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

from elasticjob._runtime.contract.names import Role
from elasticjob._runtime.contract.shipped_code import ARCHIVE, CODE_SHA256, code_config_map
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import CONFIG_MAPS, ELASTICJOBS, POD_LIST, KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_status
from elasticjob.cli.objects.pods import is_active, pod_name, pods_selector
from elasticjob.cli.objects.waiting import wait_for_job
from elasticjob.cli.shipping.archive import CodeArchive
from elasticjob.cli.shipping.errors import InTheWayError
from elasticjob.cli.views.output import VerbOutput

_AT_ONCE = 32


def update_code(
    cluster: Cluster, output: VerbOutput, name: str, archive: CodeArchive, wait_seconds: float | None
) -> int:
    """Ship other code to a job; return the exit code. `wait_seconds`: how long to wait until it trains with it."""
    job = cluster.get(ELASTICJOBS, name)
    _check(job, name)
    if _digest_of(job) == archive.digest:
        output.line(f"{name} has this code already: {archive.summary()}")
        return 0
    annotation = {"metadata": {"annotations": {CODE_SHA256: archive.digest}}}
    data = {ARCHIVE: base64.b64encode(archive.data).decode()}
    cluster.patch(CONFIG_MAPS, code_config_map(name), {**annotation, "binaryData": data})
    _hurry_kubelets(cluster, output, name, annotation)
    cluster.patch(ELASTICJOBS, name, annotation)
    if _digest_of(cluster.get(CONFIG_MAPS, code_config_map(name))) != archive.digest:
        raise ClusterError(f"another update of {name} came at the same time: run this one again")
    output.line(f"{name} gets new code: {archive.summary()}")
    if wait_seconds is not None and not is_true(job, "Suspended"):
        before = int(job_status(job).get("rendezvousRound", 0))
        what = f"{name} trains with the new code"
        wait_for_job(cluster, output, name, lambda now: _trains_after(now, before), what=what, seconds=wait_seconds)
        output.line(what)
    return 0


def _check(job: KubeObject, name: str) -> None:
    if not _digest_of(job):
        raise InTheWayError(f"{name} was not submitted by elasticjob submit: its code is in its image or its volumes")
    if has_finished(job):
        raise InTheWayError(f"{name} has ended: submit it again under another --name")


def _digest_of(found: KubeObject) -> str:
    return str((found["metadata"].get("annotations") or {}).get(CODE_SHA256, ""))


def _trains_after(job: KubeObject, before: int) -> bool:
    return is_true(job, "Running") and int(job_status(job).get("rendezvousRound", 0)) > before


def _hurry_kubelets(cluster: Cluster, output: VerbOutput, name: str, annotation: KubeObject) -> None:
    """Change the worker pods, so that their kubelets renew the mounted ConfigMap at once."""
    pods = [pod_name(pod) for pod in cluster.list(POD_LIST, pods_selector(name, Role.WORKER)) if is_active(pod)]

    def change(pod: str) -> ClusterError | None:
        try:
            cluster.patch(POD_LIST, pod, annotation)
        except ClusterError as error:
            return None if isinstance(error, RefusedError) and error.not_found else error
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        errors = [error for error in pool.map(change, pods) if error is not None]
    if errors:
        output.note(f"the pods get the code within about 90 s, and not at once: {errors[0]}")
