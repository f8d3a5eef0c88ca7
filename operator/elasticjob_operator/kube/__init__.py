"""The only seam between the operator and the API server: raw JSON both ways."""

from elasticjob_operator.kube.api import CRDS, EVENTS, JOBS, LEASES, PODS, SECRETS, SERVICES, KubeApi, Resource
from elasticjob_operator.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, Refused, Unclear

__all__ = [
    "CRDS",
    "EVENTS",
    "JOBS",
    "LEASES",
    "PODS",
    "SECRETS",
    "SERVICES",
    "AlreadyExists",
    "Conflict",
    "KubeApi",
    "KubeError",
    "NotFound",
    "Refused",
    "Resource",
    "Unclear",
]
