"""Manifests of a job's children as dicts. Pure: names and content follow from the job's state."""

from elasticjob_operator.manifests.evictions import add_responder, answered_status
from elasticjob_operator.manifests.gang import gang_child, gang_manifest, gang_name, gang_resize
from elasticjob_operator.manifests.names import (
    key_secret,
    nodes_service,
    policy_name,
    store_pod,
    store_service,
    worker_pod,
)
from elasticjob_operator.manifests.policies import policy_manifest
from elasticjob_operator.manifests.services import nodes_service_manifest, secret_manifest, store_service_manifest
from elasticjob_operator.manifests.store import store_pod_manifest
from elasticjob_operator.manifests.worker import worker_pod_manifest
from elasticjob_operator.manifests.workload import (
    apply_admission,
    asks_for,
    finished_status,
    ready_status,
    reclaimed_status,
    released_status,
    step_manifest,
    step_name,
    workload_child,
    workload_manifest,
    workload_names,
    workload_request,
)

__all__ = [
    "add_responder",
    "answered_status",
    "apply_admission",
    "asks_for",
    "finished_status",
    "gang_child",
    "gang_manifest",
    "gang_name",
    "gang_resize",
    "key_secret",
    "nodes_service",
    "nodes_service_manifest",
    "policy_manifest",
    "policy_name",
    "ready_status",
    "reclaimed_status",
    "released_status",
    "secret_manifest",
    "step_manifest",
    "step_name",
    "store_pod",
    "store_pod_manifest",
    "store_service",
    "store_service_manifest",
    "worker_pod",
    "worker_pod_manifest",
    "workload_child",
    "workload_manifest",
    "workload_names",
    "workload_request",
]
