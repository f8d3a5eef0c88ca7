"""Create a job together with the ConfigMap of its code."""

from __future__ import annotations

from contextlib import suppress

from elasticjob._runtime.contract.names import KIND
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import CONFIG_MAPS, ELASTICJOBS, KubeObject
from elasticjob.cli.shipping.archive import CodeArchive
from elasticjob.cli.shipping.errors import InTheWayError, SubmitError
from elasticjob.cli.shipping.flag_values import check_request
from elasticjob.cli.shipping.job_request import JobRequest, code_object, job_manifest, owner_of_code

_CONFLICT = 409


def checked_objects(request: JobRequest, archive: CodeArchive) -> tuple[KubeObject, KubeObject]:
    """Return the ElasticJob and the ConfigMap of its code. SubmitError: no API server would take them."""
    check_request(request)
    manifest = job_manifest(request, archive.digest)
    if problems := find_problems(manifest):
        raise SubmitError("; ".join(problems))
    return manifest, code_object(request, archive)


def create_objects(cluster: Cluster, manifest: KubeObject, code: KubeObject | None) -> KubeObject:
    """Create the ConfigMap `code`, then the job that owns it, and return the job. ClusterError: neither is left.

    The ConfigMap comes first: the pods of a job without it would wait for the next attempt of their kubelets.
    `code` is None if the image has the code.
    """
    if code is not None:
        _create_code(cluster, code)
    try:
        job = cluster.create(ELASTICJOBS, manifest)
        if code is not None:
            cluster.patch(CONFIG_MAPS, code["metadata"]["name"], owner_of_code(job))
    except BaseException as error:
        if code is not None:
            _remove_unless_owned(cluster, code["metadata"]["name"])
        if isinstance(error, RefusedError) and error.status == _CONFLICT:
            raise _name_is_taken(manifest["metadata"]["name"]) from None
        raise
    return job


def _create_code(cluster: Cluster, code: KubeObject) -> None:
    try:
        cluster.create(CONFIG_MAPS, code)
    except RefusedError as error:
        if error.status != _CONFLICT:
            raise
        name = code["metadata"]["name"]
        found = cluster.get(CONFIG_MAPS, name)["metadata"]
        ours = (found.get("labels") or {}).items() >= code["metadata"]["labels"].items()
        owners = found.get("ownerReferences") or []
        if ours and (job := next((owner["name"] for owner in owners if owner.get("kind") == KIND), None)):
            raise _name_is_taken(job) from None
        if owners or not ours:
            raise InTheWayError(f"there is a ConfigMap {name} already: choose another --name") from None
        # A submit that was killed between its two requests has left it.
        cluster.delete(CONFIG_MAPS, name)
        cluster.create(CONFIG_MAPS, code)


def _name_is_taken(job: str) -> InTheWayError:
    return InTheWayError(
        f"there is a job {job} already: choose another --name, or end that one first with kubectl delete ej {job}"
    )


def _remove_unless_owned(cluster: Cluster, name: str) -> None:
    """Delete a ConfigMap of code that no job owns. What goes wrong is less than the error that led here."""
    with suppress(ClusterError):
        if not cluster.get(CONFIG_MAPS, name)["metadata"].get("ownerReferences"):
            cluster.delete(CONFIG_MAPS, name)
