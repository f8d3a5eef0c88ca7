"""The APIs of gang schedulers. A cluster has them only where an administrator installed them."""

from __future__ import annotations

from elasticjob_operator.kube.api import COSCHEDULING_GROUPS, KUBERNETES_GROUPS, VOLCANO_GROUPS, KubeApi, Resource
from elasticjob_operator.kube.errors import KubeError, NotFound, Refused
from elasticjob_operator.model.cluster.raw import Raw
from elasticjob_operator.model.job.spec import GangProvider

GANG_RESOURCES = {
    GangProvider.COSCHEDULING: COSCHEDULING_GROUPS,
    GangProvider.VOLCANO: VOLCANO_GROUPS,
    GangProvider.KUBERNETES: KUBERNETES_GROUPS,
}
_INSTALL = {
    GangProvider.COSCHEDULING: "install the coscheduling plugin of scheduler-plugins with its CRDs",
    GangProvider.VOLCANO: "install Volcano",
    GangProvider.KUBERNETES: (
        "start Kubernetes 1.37 or newer with the feature gate GenericWorkload and its API server with "
        "--runtime-config=scheduling.k8s.io/v1beta1=true (the alpha versions in 1.35 and 1.36 cannot be used)"
    ),
}


async def find_gang(api: KubeApi, provider: GangProvider, namespace: str, name: str) -> Raw | None:
    """Return the gang object, or None if it does not exist, its API does not, or the operator may not read it.

    The creation that follows shows which of these it is.
    """
    try:
        return await api.get(GANG_RESOURCES[provider], namespace, name)
    except (NotFound, Refused):
        return None


def explain_gang_refusal(provider: GangProvider, error: KubeError) -> str:
    """Return why a gang object could not be created, and what to do about it."""
    resource = GANG_RESOURCES[provider]
    if isinstance(error, NotFound):
        return (
            f"the cluster has no {_described(resource)}: {_INSTALL[provider]}, or set spec.gang.provider to none while "
            "the job is suspended"
        )
    if error.status == 403 and not (isinstance(error, Refused) and error.quota):
        return f"{error}: set gang.{provider.value} to true in the values of elasticjob's chart"
    return str(error)


def _described(resource: Resource) -> str:
    return f"{resource.plural}.{resource.group}/{resource.version}"
