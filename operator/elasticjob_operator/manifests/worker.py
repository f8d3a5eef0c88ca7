"""Manifest of a worker pod: the user's template, with the trainer's command wrapped by the elasticjob agent."""

from __future__ import annotations

import copy
import re
from typing import Any

from elasticjob._runtime.contract.names import WORKER_ROLE, Env, Role
from elasticjob_operator.manifests.common import env, env_from_field, env_from_secret, exclude_nodes, security_context
from elasticjob_operator.manifests.gang import join_gang
from elasticjob_operator.manifests.names import (
    attempt,
    endpoint,
    key_secret,
    metadata,
    nodes_service,
    pod_labels,
    worker_pod,
)
from elasticjob_operator.manifests.placement import HOSTNAME, prefer_placement
from elasticjob_operator.manifests.services import NODE_KEY
from elasticjob_operator.model.cluster.pods import AVOIDED_NODES, FAILED_STARTS, TRAINER_CONTAINER
from elasticjob_operator.model.cluster.raw import Raw, mapping, text
from elasticjob_operator.model.job.spec import LEAVE_SECONDS, JobSpec, trainer_of, uses_host_network
from elasticjob_operator.model.observed import Job

AGENT_DIR = "/elasticjob"
AGENT = f"{AGENT_DIR}/agent.pyz"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
_COPIED_RESOURCES = ("cpu", "memory", "ephemeral-storage")
"""Resources of the trainer that the init container has too: not devices."""
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Annotation of a pod: the container whose log `kubectl logs` shows."""
_PYTHON = re.compile(r"python[0-9.]*")


def worker_pod_manifest(
    job: Job,
    spec: JobSpec,
    index: int,
    incarnation: int,
    image: str,
    avoid: tuple[str, ...] = (),
    failed_starts: int = 0,
    placement_label: str = HOSTNAME,
    *,
    outside_gang: bool = False,
) -> dict[str, Any]:
    """Return the pod of one index and incarnation.

    `image` holds the agent, `avoid` names nodes that the pod must not run on, `failed_starts` is the number of attempts
    to start the job's pods that have failed, `placement_label` the label of Nodes that `spec.placement` is about,
    `outside_gang` whether the pod is not a member of the job's gang.
    """
    template: dict[str, Any] = copy.deepcopy(dict(spec.template))
    own = template.get("metadata") or {}
    labels = {**(own.get("labels") or {}), **pod_labels(job, Role.WORKER, index, incarnation)}
    meta = metadata(job, worker_pod(job.name, index, incarnation), labels)
    pod: dict[str, Any] = template["spec"]
    trainer = text(trainer_of(pod), "name")
    annotations = {DEFAULT_CONTAINER: trainer, **(own.get("annotations") or {}), TRAINER_CONTAINER: trainer}
    if avoid:
        annotations[AVOIDED_NODES] = ",".join(avoid)
    annotations.pop(FAILED_STARTS, None)
    if failed_starts:
        annotations[FAILED_STARTS] = str(failed_starts)
    meta["annotations"] = annotations
    _fill_pod(pod, job, spec, index, avoid)
    prefer_placement(pod, job, spec.placement, placement_label)
    pod["initContainers"] = [_init_container(image, pod), *(pod.get("initContainers") or [])]
    for container in pod["initContainers"]:
        # So that status quotes the last line of one that fails.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _fill_trainer(pod, job, spec, index, incarnation)
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}
    join_gang(manifest, job, spec, outside_gang=outside_gang)
    return manifest


def _fill_pod(pod: dict[str, Any], job: Job, spec: JobSpec, index: int, avoid: tuple[str, ...]) -> None:
    pod["restartPolicy"] = "Never"
    pod["hostname"] = f"{job.name}-{index}"
    pod["subdomain"] = nodes_service(job.name)
    pod["enableServiceLinks"] = False
    if uses_host_network(spec.template) and (pod.get("dnsPolicy") or "ClusterFirst") == "ClusterFirst":
        # Else the kubelet gives the pod the DNS of its Node, which does not know the store's name.
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    pod.setdefault("automountServiceAccountToken", False)
    pod["terminationGracePeriodSeconds"] = spec.termination_grace
    pod["volumes"] = [*(pod.get("volumes") or []), {"name": "elasticjob-agent", "emptyDir": {"sizeLimit": "16Mi"}}]
    if avoid:
        exclude_nodes(pod, avoid)


def _init_container(image: str, pod: Raw) -> dict[str, Any]:
    """Return the container that copies the agent.

    It has the trainer's requests and limits. It ends before the trainer starts, and a pod needs the larger one of the
    two, so that costs nothing. With resources of its own a Guaranteed pod would be Burstable, which has no exclusive
    CPUs and no NUMA alignment, and a LimitRange that admits the trainer might refuse the pod.
    """
    trainer = trainer_of(pod)
    kinds = {kind: mapping(trainer, "resources", kind) for kind in ("requests", "limits")}
    resources = {k: {n: amounts[n] for n in _COPIED_RESOURCES if n in amounts} for k, amounts in kinds.items()}
    return {
        "name": "elasticjob-agent",
        "image": image,
        "command": ["cp", "/opt/elasticjob/agent.pyz", AGENT],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
        "securityContext": security_context(pod),
        "volumeMounts": [{"name": "elasticjob-agent", "mountPath": AGENT_DIR}],
    }


def _fill_trainer(pod: dict[str, Any], job: Job, spec: JobSpec, index: int, incarnation: int) -> None:
    trainer: dict[str, Any] = trainer_of(pod)  # type: ignore[assignment]  # a part of the copied template
    trainer["command"] = _wrapped_command(trainer)
    trainer.pop("args", None)
    trainer.pop("restartPolicy", None)  # Never, as of the pod: only newer API servers accept it for a container
    trainer["terminationMessagePolicy"] = "File"
    path = trainer.get("terminationMessagePath")
    agent_env = _agent_env(job, spec, index, incarnation, {Env.TERMINATION_LOG: path} if path else {})
    names = {item["name"] for item in agent_env}
    template_env = [item for item in trainer.get("env") or [] if item.get("name") not in names]
    # The agent's variables come first, so that the template's may refer to them as $(NAME).
    trainer["env"] = [*agent_env, *template_env]
    mounts = list(trainer.get("volumeMounts") or [])
    mounts.append({"name": "elasticjob-agent", "mountPath": AGENT_DIR, "readOnly": True})
    if not any(str(m.get("mountPath", "")).rstrip("/") == SHARED_MEMORY for m in mounts):
        # The container runtime's default of 64 MiB is too small for data loaders, gloo and NCCL.
        mounts.append({"name": "elasticjob-shm", "mountPath": SHARED_MEMORY})
        pod["volumes"].append({"name": "elasticjob-shm", "emptyDir": {"medium": "Memory"}})
    trainer["volumeMounts"] = mounts


def _wrapped_command(trainer: dict[str, Any]) -> list[str]:
    command = [*trainer["command"], *(trainer.get("args") or [])]
    first = command[0]
    python = first if _PYTHON.fullmatch(first.rsplit("/", 1)[-1]) else "python3"
    return [python, AGENT, "agent", "--", *command]


def _agent_env(job: Job, spec: JobSpec, index: int, incarnation: int, more: dict[str, object]) -> list[dict[str, Any]]:
    values: dict[str, object] = {
        Env.JOB: job.name,
        Env.RUN_ID: job.uid,
        Env.EXECUTION_ATTEMPT: attempt(job),
        Env.INDEX: index,
        Env.POD_NAME: worker_pod(job.name, index, incarnation),
        Env.INCARNATION: incarnation,
        Env.STORE_ENDPOINT: endpoint(job, spec.port),
        Env.NPROC_PER_NODE: spec.nproc_per_node,
        Env.NPROC_IS_DEFAULT: int(spec.nproc_is_default),
        Env.GPUS: spec.gpus,
        Env.ROLE: text(spec.template, "metadata", "annotations", WORKER_ROLE),
        Env.RENDEZVOUS_BACKEND: spec.backend.value,
        Env.PRELOAD: ",".join(spec.preload),
        Env.STOP_GRACE_SECONDS: spec.stop_grace,
        Env.GRACEFUL_SHUTDOWN_SECONDS: spec.planned_end,
        Env.POD_GRACE_SECONDS: spec.termination_grace - LEAVE_SECONDS,
        Env.JOIN_TIMEOUT_SECONDS: spec.join_timeout,
        Env.TRAINER_INTEGRATION: spec.trainer_integration.value,
        Env.KEEP_ALIVE: f"{spec.keep_alive_interval}x{spec.keep_alive_attempts}",
    }
    return [
        *env(values | more),
        env_from_field(Env.POD_IP, "status.podIP"),
        env_from_secret(Env.NODE_KEY, key_secret(job), NODE_KEY),
    ]
