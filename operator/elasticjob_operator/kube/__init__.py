"""Client of the API server: the operator's only access to it, with raw JSON in both directions."""

from elasticjob_operator.kube.api import (
    BUDGETS,
    CRDS,
    EVENTS,
    JOBS,
    LEASES,
    LIMIT_RANGES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    KubeApi,
    Page,
    Resource,
)
from elasticjob_operator.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, Refused, Throttled, Unclear

__all__ = [
    "BUDGETS",
    "CRDS",
    "EVENTS",
    "JOBS",
    "LEASES",
    "LIMIT_RANGES",
    "NETWORK_POLICIES",
    "NODES",
    "PODS",
    "SECRETS",
    "SERVICES",
    "AlreadyExists",
    "Conflict",
    "KubeApi",
    "KubeError",
    "NotFound",
    "Page",
    "Refused",
    "Resource",
    "Throttled",
    "Unclear",
]
