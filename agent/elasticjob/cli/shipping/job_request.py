"""The objects of a submitted job: the ElasticJob, and the ConfigMap with its code. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND, VERSION, Label
from elasticjob._runtime.contract.shipped_code import (
    ARCHIVE,
    ARCHIVE_FOLDER,
    CODE_FOLDER,
    CODE_SHA256,
    code_config_map,
)
from elasticjob.cli.cluster.resources import KubeObject
from elasticjob.cli.shipping.archive import CodeArchive
from elasticjob.cli.shipping.errors import SubmitError

GPU = "nvidia.com/gpu"
LONGEST_STEM = 40
"""Characters of a name that come from the script's: the API allows 50 in all."""


@dataclass(frozen=True)
class ClaimMount:
    """A PersistentVolumeClaim of the namespace, and where each pod mounts it."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class JobRequest:
    """What a user wants to run."""

    name: str
    image: str
    command: tuple[str, ...]
    """The command in the container, relative to the folder that is shipped."""
    pods: int = 1
    min_pods: int | None = None
    """Fewest worker pods to train on; None: as `max_pods` says, or as many as `pods`."""
    max_pods: int | None = None
    gpus: int = 0
    """NVIDIA GPUs of each pod."""
    workers: int | None = None
    """Workers of each pod; None: one for each GPU, or one."""
    cpu: str = ""
    """CPUs that each pod requests, as Kubernetes writes them; empty: none."""
    memory: str = ""
    """Memory that each pod requests and may use; empty: no limit."""
    env: Mapping[str, str] = field(default_factory=dict)
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets of the namespace with which images are pulled."""
    claims: tuple[ClaimMount, ...] = ()
    """PersistentVolumeClaims that each pod mounts."""
    namespace: str = ""
    """Only for the manifest's text; empty: leave it out."""


def job_name(script: str, suffix: str) -> str:
    """Return a name for a job, such as `train-x7k2p`. `suffix`: random characters of a-z and 0-9."""
    stem = script.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:LONGEST_STEM].strip("-")
    return f"{words if words[:1].isalpha() else f'job-{words}'.strip('-')}-{suffix}"


def job_manifest(request: JobRequest, digest: str) -> KubeObject:
    """Return the ElasticJob. `digest`: the archive's sha256; empty if the image has the code."""
    metadata: dict[str, Any] = {"name": request.name}
    if digest:
        metadata["annotations"] = {CODE_SHA256: digest}
    if request.namespace:
        metadata["namespace"] = request.namespace
    spec: dict[str, Any] = {"replicas": request.pods, **_elastic_policy(request)}
    workers = request.workers if request.workers is not None else request.gpus or 1
    if workers != 1 or request.gpus > 1:  # without a number it is that of the GPUs
        spec["nprocPerNode"] = workers
    spec["template"] = {"spec": {"containers": [_trainer(request)]}}
    if digest:
        _mount_code(spec["template"]["spec"], code_config_map(request.name))
    _mount_claims(spec["template"]["spec"], request.claims)
    if request.image_pull_secrets:
        spec["template"]["spec"]["imagePullSecrets"] = [{"name": name} for name in request.image_pull_secrets]
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": spec}


def _elastic_policy(request: JobRequest) -> dict[str, Any]:
    if request.min_pods is None and request.max_pods is None:
        return {}
    low = request.pods if request.min_pods is None else request.min_pods
    high = request.pods if request.max_pods is None else request.max_pods
    if not low <= request.pods <= high:
        raise SubmitError(f"--pods {request.pods} is not between --min-pods {low} and --max-pods {high}: change one")
    return {"elasticPolicy": {"minReplicas": low, "maxReplicas": high}}


def _mount_code(pod: dict[str, Any], config_map: str) -> None:
    """Mount the archive, and a volume for its files, which is the working directory."""
    pod["containers"][0] |= {
        "workingDir": CODE_FOLDER,
        "volumeMounts": [
            {"name": "code-archive", "mountPath": ARCHIVE_FOLDER, "readOnly": True},
            {"name": "code", "mountPath": CODE_FOLDER},
        ],
    }
    pod["volumes"] = [{"name": "code-archive", "configMap": {"name": config_map}}, {"name": "code", "emptyDir": {}}]


def _mount_claims(pod: dict[str, Any], claims: Sequence[ClaimMount]) -> None:
    """Mount claims; one that is mounted at two paths is one volume of the pod."""
    volumes: dict[str, str] = {}
    for mount in claims:
        volume = volumes.setdefault(mount.claim, f"pvc-{len(volumes)}")
        entry = {"name": volume, "mountPath": mount.path, **({"readOnly": True} if mount.read_only else {})}
        pod["containers"][0].setdefault("volumeMounts", []).append(entry)
    for claim, volume in volumes.items():
        source = {"persistentVolumeClaim": {"claimName": claim}}
        pod.setdefault("volumes", []).append({"name": volume, **source})


def _trainer(request: JobRequest) -> dict[str, Any]:
    trainer: dict[str, Any] = {"name": "trainer", "image": request.image, "command": list(request.command)}
    if request.env:
        trainer["env"] = [{"name": name, "value": value} for name, value in request.env.items()]
    requests = {name: value for name, value in (("cpu", request.cpu), ("memory", request.memory)) if value}
    limits: dict[str, Any] = {"memory": request.memory} if request.memory else {}
    if request.gpus:
        limits[GPU] = request.gpus
    resources = {kind: amounts for kind, amounts in (("requests", requests), ("limits", limits)) if amounts}
    return {**trainer, "resources": resources} if resources else trainer


def code_object(request: JobRequest, archive: CodeArchive) -> KubeObject:
    """Return the ConfigMap with the code, without its owner."""
    metadata: dict[str, Any] = {
        "name": code_config_map(request.name),
        "labels": {Label.JOB_NAME: request.name},
        "annotations": {CODE_SHA256: archive.digest},
    }
    if request.namespace:
        metadata["namespace"] = request.namespace
    data = {ARCHIVE: base64.b64encode(archive.data).decode()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}


def owner_of_code(job: KubeObject) -> dict[str, Any]:
    """Return the patch that lets the job own its ConfigMap, which Kubernetes then deletes with the job."""
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job["metadata"]["name"]}
    return {"metadata": {"ownerReferences": [{**owner, "uid": job["metadata"]["uid"]}]}}
