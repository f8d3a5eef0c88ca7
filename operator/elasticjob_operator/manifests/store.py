"""The store pod of a job."""

from __future__ import annotations

from typing import Any

from elasticjob.contract import codec
from elasticjob.contract.names import Env, Role
from elasticjob_operator.manifests.common import NOBODY, env, env_from_secret, keep_away, security_context
from elasticjob_operator.manifests.names import attempt, key_secret, metadata, pod_labels, store_pod
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.model.observed import Job
from elasticjob_operator.model.pods import AVOIDED_NODES
from elasticjob_operator.model.spec import JobSpec

RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
"""30 MB at 4 nodes, less than 150 MB at 1024. No CPU limit: a round must form at once."""
STATE_DIR = "/var/lib/elasticjob"


def store_pod_manifest(
    job: Job, spec: JobSpec, incarnation: int, image: str, avoid: tuple[str, ...] = ()
) -> dict[str, Any]:
    """One incarnation of the store. Its container restarts in place; a successor pod has the next incarnation.

    No probe: an agent that connects too early tries again sooner than a kubelet would look.
    """
    name = store_pod(job.name, incarnation)
    meta = metadata(job, name, pod_labels(job, Role.STORE, 0, incarnation))
    pod = _pod_spec(job, spec, incarnation, image)
    if avoid:
        meta["annotations"] = {AVOIDED_NODES: ",".join(avoid)}
        keep_away(pod, avoid)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}


def _pod_spec(job: Job, spec: JobSpec, incarnation: int, image: str) -> dict[str, Any]:
    where = spec.store
    pod: dict[str, Any] = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {"fsGroup": NOBODY, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(job, spec, incarnation, image)],
        "volumes": [{"name": "state", "emptyDir": {"sizeLimit": "1Mi"}}],
    }
    secrets = spec.template.get("spec", {}).get("imagePullSecrets")
    optional = {
        "imagePullSecrets": secrets,
        "priorityClassName": where.priority_class,
        "nodeSelector": dict(where.node_selector),
        "tolerations": list(where.tolerations),
    }
    return pod | {key: value for key, value in optional.items() if value}


def _container(job: Job, spec: JobSpec, incarnation: int, image: str) -> dict[str, Any]:
    values: dict[str, object] = {
        Env.JOB: job.name,
        Env.RUN_ID: job.uid,
        Env.EXECUTION_ATTEMPT: attempt(job),
        Env.STORE_INCARNATION: incarnation,
        Env.PORT: spec.port,
        Env.STATE_DIR: STATE_DIR,
        Env.SETTINGS: codec.dumps(spec.settings).decode(),
    }
    secret = key_secret(job.name)
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
        "resources": dict(spec.store.resources) or RESOURCES,
        "securityContext": security_context(),
        "volumeMounts": [{"name": "state", "mountPath": STATE_DIR}],
    }
