"""The TorchX scheduler `elasticjob`: `torchx run -s elasticjob dist.torchrun ...` submits an ElasticJob.

TorchX finds it by the entry point `torchx.schedulers`. It needs the `torchx` extra.
Each method that talks to a cluster raises ClusterError, whose text is one sentence, if a request fails.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import (
    AppDef,
    AppDryRunInfo,
    AppState,
    ReplicaStatus,
    Role,
    RoleStatus,
    VolumeMount,
    Workspace,
    macros,
    runopts,
)
from torchx.specs.named_resources_aws import K8S_ITYPE
from torchx.workspace import WorkspaceMixin

from elasticjob._runtime.contract.names import Label
from elasticjob._runtime.contract.names import Role as PodRole
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob.cli.cluster.connection import Cluster, connect_to_cluster
from elasticjob.cli.cluster.errors import RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, POD_LIST, KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_status, wanted_replicas
from elasticjob.cli.objects.pods import has_log, in_order, main_container, pod_name, pod_number, pods_selector
from elasticjob.cli.objects.waiting import describe_job
from elasticjob.cli.shipping.archive import CodeArchive, pack_folder
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.job_request import JobRequest, code_object, job_manifest, job_name
from elasticjob.cli.verbs.logs.logs import follow_lines
from elasticjob.cli.verbs.submit.creation import create_objects
from elasticjob.cli.verbs.submit.submit import random_suffix
from elasticjob.cli.views.output import VerbOutput

__all__ = ["ElasticJobScheduler", "create_scheduler"]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_NPROC = re.compile(r"--nproc[-_]per[-_]node[= ](\d+)")
_POD_STATES = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
}


@dataclass
class JobObjects:
    """What `schedule` creates."""

    manifest: KubeObject
    code: KubeObject | None
    """The ConfigMap with the workspace; None without one."""
    namespace: str | None
    """None: the namespace of the context."""

    def __str__(self) -> str:
        """Return the manifest as YAML. The packed code is left out, because it is not text."""
        import yaml

        return str(yaml.safe_dump(self.manifest, sort_keys=False, width=120))


class ElasticJobScheduler(WorkspaceMixin[None], Scheduler[Mapping[str, Any]]):  # type: ignore[misc]  # torchx has no types
    """Runs the one role of an application as an ElasticJob. TorchX calls its methods."""

    def _run_opts(self) -> runopts:
        options = runopts()
        options.add("namespace", type_=str, default=None, help="namespace of the job; default: that of the context")
        options.add("queue", type_=str, default=None, help="Kueue's LocalQueue for the job")
        return options

    def caching_build_workspace_and_update_role(
        self, role: Role, cfg: Mapping[str, Any], build_cache: dict[object, object]
    ) -> None:
        """Leave the image as it is: `submit_dryrun` packs the workspace, which is shipped without an image build."""

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[JobObjects]:
        if len(app.roles) != 1:
            names = ", ".join(role.name for role in app.roles)
            raise SubmitError(f"an ElasticJob has one role, and {app.name} has {len(app.roles)}: {names}")
        name = job_name(app.name, random_suffix())
        # No process needs the address: the workers find each other by the job's store.
        role = macros.Values("", name, macros.replica_id, "MASTER_ADDR").apply(app.roles[0])
        if macros.replica_id in " ".join((*role.args, *role.env.values())):
            raise SubmitError(f"role {role.name} uses the macro replica_id, but ranks change: use RANK of the workers")
        archive = _pack(role.workspace) if role.workspace else None
        request = _request(name, role, cfg.get("namespace"))
        manifest = job_manifest(request, archive.digest if archive else "")
        _put_role(manifest["spec"], role)
        if cfg.get("queue"):
            manifest["metadata"]["labels"] = {QUEUE_LABEL: cfg["queue"]}
        if problems := find_problems(manifest):
            raise SubmitError("; ".join(problems))
        code = code_object(request, archive) if archive else None
        return AppDryRunInfo(JobObjects(manifest, code, cfg.get("namespace")), str)

    def schedule(self, dryrun_info: AppDryRunInfo[JobObjects]) -> str:
        """Create the job; return its id, `NAMESPACE:NAME`."""
        objects = dryrun_info.request
        cluster = connect_to_cluster(None, None, objects.namespace)
        return _app_id(cluster, create_objects(cluster, objects.manifest, objects.code))

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the state of a job and, of each index, that of the newest pod; None if there is no such job."""
        cluster, name = _find(app_id)
        try:
            job = cluster.get(ELASTICJOBS, name)
        except RefusedError as error:
            if error.not_found:
                return None
            raise
        container = job["spec"]["template"]["spec"]["containers"][0]
        command = [*container.get("command", []), *container.get("args", [])]
        role = Role(
            name=container["name"], image=container.get("image", ""), entrypoint=(command or [""])[0],
            args=command[1:], num_replicas=wanted_replicas(job),
        )  # fmt: skip
        pods = in_order(cluster.list(POD_LIST, pods_selector(name, PodRole.WORKER)))
        newest = {pod_number(pod, Label.INDEX): pod for pod in pods}
        replicas = [_replica(index, pod, role.name) for index, pod in newest.items()]
        return DescribeAppResponse(
            app_id=app_id, state=_state(job), num_restarts=job_status(job).get("restarts", 0), msg=describe_job(job),
            roles_statuses=[RoleStatus(role.name, replicas)], roles=[role],
        )  # fmt: skip

    def list(self, cfg: Mapping[str, Any] | None = None) -> list[ListAppResponse]:
        """Return the jobs of the namespace, those too that TorchX has not submitted."""
        cluster = connect_to_cluster(None, None, (cfg or {}).get("namespace"))
        jobs = cluster.list(ELASTICJOBS)
        return [ListAppResponse(_app_id(cluster, job), _state(job), name=job["metadata"]["name"]) for job in jobs]

    def _cancel_existing(self, app_id: str) -> None:
        cluster, name = _find(app_id)
        cluster.delete(ELASTICJOBS, name)

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Yield the lines of the pods with index `k`, one after the other, each with its newline.

        `since` and `until` without a time zone are local times.
        SubmitError: `streams` asks for one of the two, which a pod's log mixes.
        """
        if streams not in (None, Stream.COMBINED):
            raise SubmitError(f"a pod's log has both streams in one: ask for {Stream.COMBINED.value}")
        cluster, name = _find(app_id)
        lines = follow_lines(cluster, _notes(), name, k) if should_tail else _lines(cluster, name, k)
        first, last = _stamp(since), _stamp(until)
        wanted = re.compile(regex or "")
        return (f"{x}\n" for t, x in lines if first <= t and (not last or t <= last) and wanted.search(x))


def create_scheduler(session_name: str, **_: object) -> ElasticJobScheduler:
    """Return the scheduler, for TorchX's entry point."""
    return ElasticJobScheduler("elasticjob", session_name)


def _pack(workspace: Workspace) -> CodeArchive:
    try:
        if workspace.is_unmapped_single_project():
            return pack_folder(Path(str(workspace)).expanduser().resolve())
        with tempfile.TemporaryDirectory() as folder:
            workspace.merge_into(folder)
            return pack_folder(Path(folder))
    except SubmitError as error:
        raise SubmitError(str(error).replace("--code", "--workspace")) from None


def _request(name: str, role: Role, namespace: str | None) -> JobRequest:
    resource = role.resource
    asked = _NPROC.search(" ".join(role.args))
    return JobRequest(
        name, role.image, (role.entrypoint, *role.args), role.num_replicas, role.min_replicas,
        gpus=max(resource.gpu, 0), workers=int(asked[1]) if asked else 1,
        cpu=str(resource.cpu) if resource.cpu > 0 else "", memory=f"{resource.memMB}Mi" if resource.memMB > 0 else "",
        env=role.env, namespace=namespace or "",
    )  # fmt: skip


def _put_role(spec: dict[str, Any], role: Role) -> None:
    """Write what a JobRequest does not have: names, mounts, devices, the type of Node and the budget of restarts."""
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    container["name"] = re.sub(r"[^a-z0-9]+", "-", role.name.lower())[:63].strip("-") or "trainer"
    if spec.get("elasticPolicy") == {"minReplicas": role.num_replicas, "maxReplicas": role.num_replicas}:
        del spec["elasticPolicy"]
    if role.max_retries:
        spec["failurePolicy"] = {"maxRestarts": role.max_retries}
    if role.resource.devices:
        container.setdefault("resources", {}).setdefault("limits", {}).update(role.resource.devices)
    if instance := role.resource.capabilities.get(K8S_ITYPE):
        pod["nodeSelector"] = {K8S_ITYPE: instance}
    for number, mount in enumerate(role.mounts):
        if not isinstance(mount, VolumeMount):
            raise SubmitError(f"{mount}: only volumes (type=volume,src=CLAIM,dst=PATH) can be mounted")
        volume = {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": mount.src}}
        pod.setdefault("volumes", []).append(volume)
        place = {"name": volume["name"], "mountPath": mount.dst_path, "readOnly": mount.read_only}
        container.setdefault("volumeMounts", []).append(place)


def _find(app_id: str) -> tuple[Cluster, str]:
    """Return the cluster and the name of a job. Without a namespace it is that of the context."""
    namespace, _, name = app_id.rpartition(":")
    return connect_to_cluster(None, None, namespace or None), name


def _app_id(cluster: Cluster, job: KubeObject) -> str:
    return f"{cluster.namespace}:{job['metadata']['name']}"


def _state(job: KubeObject) -> AppState:
    if has_finished(job):
        return AppState.SUCCEEDED if is_true(job, "Complete") else AppState.FAILED
    if is_true(job, "Running"):
        return AppState.RUNNING
    return AppState.PENDING if job_status(job) else AppState.SUBMITTED


def _replica(index: int, pod: KubeObject, role: str) -> ReplicaStatus:
    state = _POD_STATES.get(pod.get("status", {}).get("phase", "Pending"), AppState.UNKNOWN)
    return ReplicaStatus(index, state, role, pod_name(pod))


def _lines(cluster: Cluster, name: str, index: int) -> Iterator[tuple[str, str]]:
    """Yield (time, line) of what the pods of an index have logged so far."""
    for pod in in_order(cluster.list(POD_LIST, pods_selector(name, PodRole.WORKER))):
        if pod_number(pod, Label.INDEX) == index and has_log(pod):
            yield from cluster.log_lines(pod_name(pod), main_container(pod))


def _notes() -> VerbOutput:
    return VerbOutput(None, sys.stdout, sys.stderr)


def _stamp(time: datetime | None) -> str:
    """Return a time as the API server writes those of log lines, so that texts compare as times do."""
    return time.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if time else ""
