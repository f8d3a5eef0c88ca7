"""Manifest of a job's store pod."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.commands.worker_count import quantity
from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import Env, Role, job_store_clients
from elasticjob_operator.manifests.common import env, env_from_secret, exclude_nodes, security_context
from elasticjob_operator.manifests.names import (
    attempt,
    key_secret,
    metadata,
    pod_labels,
    role_selector,
    store_pod,
)
from elasticjob_operator.manifests.placement import HOSTNAME
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY, store_selector
from elasticjob_operator.model.cluster.pods import AVOIDED_NODES
from elasticjob_operator.model.cluster.raw import Raw, mapping
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.observed import Job

REQUESTS, LIMITS = {"cpu": "50m", "memory": "64Mi"}, {"memory": "512Mi"}
"""The store uses 25 MiB at 4 nodes and 70 MiB at 4096. The memory limit is well above that and all that the
store allows its clients (`store_pod.main.store_limits`). No CPU limit: CPU throttling would delay rounds."""
STATE_DIR = "/var/lib/elasticjob"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Annotation of a pod. Without it cluster-autoscaler keeps each node with a store, because a store has an emptyDir: a
standby store takes over from one that is evicted."""


def store_pod_manifest(
    job: Job,
    spec: JobSpec,
    incarnation: int,
    image: str,
    avoid: tuple[str, ...] = (),
    settings: RoundSettings | None = None,
    *,
    standby: bool = False,
) -> dict[str, Any]:
    """Return the pod of one incarnation. Its container restarts in place; a successor pod has the next incarnation.

    It has no probe: an agent that connects too early tries again sooner than the kubelet would probe.
    `avoid` names nodes that the pod must not run on, `settings` are what its coordinator begins with, by default those
    of the spec. A `standby` store starts passive, on another node than the store
    that serves and, if there is one, than its workers, so that no node's loss takes both.
    """
    name = store_pod(job.name, incarnation)
    meta = metadata(job, name, {**spec.store.labels, **pod_labels(job, Role.STORE, 0, incarnation)})
    pod = _pod_spec(job, spec, incarnation, image, settings or spec.settings)
    if standby:
        pod["containers"][0]["env"].append({"name": Env.STANDBY_STORE, "value": "1"})
        pod["affinity"] = {"podAntiAffinity": _apart_from_store_and_workers(job)}
    own = {key: value for key, value in spec.store.annotations.items() if key != AVOIDED_NODES}
    annotations = {SAFE_TO_EVICT: "true", **own}
    if avoid:
        annotations[AVOIDED_NODES] = ",".join(avoid)
        exclude_nodes(pod, avoid)
    meta["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}


def _apart_from_store_and_workers(job: Job) -> dict[str, Any]:
    """Return preferences, not requirements: a standby store on the same node still replaces one that fails alone.

    Each pod on a node counts. So a worker has the smallest weight, and stores that served before, whose pods may not
    have ended yet, have none.
    """
    selected = [
        (100, store_selector(job, job.status.store_incarnation or 0)),
        (1, role_selector(job, Role.WORKER)),
    ]
    return {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": weight,
                "podAffinityTerm": {"labelSelector": {"matchLabels": labels}, "topologyKey": HOSTNAME},
            }
            for weight, labels in selected
        ]
    }


def _pod_spec(job: Job, spec: JobSpec, incarnation: int, image: str, settings: RoundSettings) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # A store that is drained with a node serves until the node has left.
        "terminationGracePeriodSeconds": spec.termination_grace,
        # No fsGroup, user or group: the image has a numeric user, a cluster may assign others (OpenShift's ranges), and
        # every user may write to an emptyDir.
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(job, spec, incarnation, image, settings)],
        "volumes": [{"name": "state", "emptyDir": {"sizeLimit": "1Mi"}}],
    }
    secrets = spec.template.get("spec", {}).get("imagePullSecrets")
    optional = {
        "imagePullSecrets": secrets,
        "priorityClassName": spec.store.priority_class,
        "serviceAccountName": spec.store.service_account,
        "nodeSelector": dict(spec.store.node_selector),
        "tolerations": list(spec.store.tolerations),
    }
    return pod | {key: value for key, value in optional.items() if value}


def _resources(own: Raw) -> dict[str, Any]:
    """Return the operator's requests and limits with those of the job in their place.

    The job may give one of the two: a request of the operator's is then no more than the job's limit, and a limit no
    less than the job's request.
    """
    requests, limits = mapping(own, "requests"), mapping(own, "limits")
    lowered = {name: min(amount, limits.get(name, amount), key=quantity) for name, amount in REQUESTS.items()}
    raised = {name: max(amount, requests.get(name, amount), key=quantity) for name, amount in LIMITS.items()}
    return {"requests": {**lowered, **requests}, "limits": {**raised, **limits}}


def _container(job: Job, spec: JobSpec, incarnation: int, image: str, settings: RoundSettings) -> dict[str, Any]:
    values: dict[str, object] = {
        Env.JOB: job.name,
        Env.RUN_ID: job.uid,
        Env.EXECUTION_ATTEMPT: attempt(job),
        Env.STORE_INCARNATION: incarnation,
        Env.PORT: spec.port,
        Env.STATE_DIR: STATE_DIR,
        Env.STORE_CLIENTS: job_store_clients(spec.backend).value,
        Env.SETTINGS: codec.dumps(settings).decode(),
    }
    secret = key_secret(job)
    return {
        "name": "store",
        "image": image,
        "command": ["elasticjob", "store"],
        "env": [
            *env(values),
            env_from_secret(Env.NODE_KEY, secret, NODE_KEY),
            env_from_secret(Env.OPERATOR_KEY, secret, OPERATOR_KEY),
        ],
        "ports": [{"name": "rendezvous", "containerPort": spec.port}],
        "resources": _resources(spec.store.resources),
        "securityContext": security_context(),
        "volumeMounts": [{"name": "state", "mountPath": STATE_DIR}],
    }
