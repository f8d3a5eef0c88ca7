"""Resources and calls that the operator uses. This list is complete: a test compares it with the chart's RBAC rules.

elasticjobs                 delete, get, list, watch
elasticjobs/status          update
pods                        create, delete, get, list, watch
services                    create, delete, get, patch
poddisruptionbudgets        create, delete, get, patch
networkpolicies             create, delete, get, patch
secrets                     create
secrets (own namespace)     get (the master key)
events                      create, list, patch
limitranges                 list
leases (own namespace)      create, get, update
leases (kube-node-lease)    get
customresourcedefinitions   get (elasticjobs.elasticjob.dev)
nodes (nodeWarnings, topologyLabels)  list, watch

With the chart's value gang.coscheduling, gang.volcano or gang.kubernetes:

podgroups (scheduling.x-k8s.io)    create, delete, get, patch
podgroups (scheduling.volcano.sh)  create, delete, get, patch
podgroups (scheduling.k8s.io)      create, delete, get, patch

With the chart's value metrics.secure.enabled:

tokenreviews (authentication.k8s.io)         create
subjectaccessreviews (authorization.k8s.io)  create

With the chart's value evictionRequests.enabled:

evictions (lifecycle.k8s.io)         list, watch
evictions/status (lifecycle.k8s.io)  update

With the chart's value kueue.enabled:

workloads (kueue.x-k8s.io)                create, delete, get, list, patch, watch
workloads/status (kueue.x-k8s.io)         update
resourceflavors (kueue.x-k8s.io)          get
workloadpriorityclasses (kueue.x-k8s.io)  get
priorityclasses (scheduling.k8s.io)       get
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elasticjob._runtime.contract.names import GROUP, PLURAL, VERSION


@dataclass(frozen=True)
class Resource:
    """A resource type of the API server; `group` is empty for the core API."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the URL path of an object; without a name, of the collection."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


JOBS = Resource(GROUP, VERSION, PLURAL)
PODS = Resource("", "v1", "pods")
SERVICES = Resource("", "v1", "services")
SECRETS = Resource("", "v1", "secrets")
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies")
EVENTS = Resource("", "v1", "events")
LIMIT_RANGES = Resource("", "v1", "limitranges")
NODES = Resource("", "v1", "nodes")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
COSCHEDULING_GROUPS = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups")
KUBERNETES_GROUPS = Resource("scheduling.k8s.io", "v1beta1", "podgroups")
VOLCANO_GROUPS = Resource("scheduling.volcano.sh", "v1beta1", "podgroups")
KUEUE_WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads")
RESOURCE_FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors")
WORKLOAD_PRIORITY_CLASSES = Resource("kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses")
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses")
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews")
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews")
EVICTIONS = Resource("lifecycle.k8s.io", "v1alpha1", "evictions")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")


@dataclass(frozen=True)
class Page:
    """One response to a list in pages."""

    items: Sequence[dict[str, Any]]
    version: str
    """The resourceVersion of the whole list: a watch may go on from it."""


class KubeApi(Protocol):
    """Calls of the API server. Each may raise a KubeError or be cancelled; the client retries and limits the rate."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any]: ...

    async def list(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[dict[str, Any]]:
        """Return all objects that match the label and field selectors, as of now (not from the API server's cache)."""
        ...

    def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        """Yield the same in pages, so that not all of them are in memory at once."""
        ...

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    async def update(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        """Replace an object; Conflict where its resourceVersion is not the newest."""
        ...

    async def patch(self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a JSON merge patch."""
        ...

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, grace: int | None = None
    ) -> dict[str, Any]:
        """Delete the object where it has this UID, else Conflict; `grace` in seconds, None: the object's own.

        Return the object as it is until it is gone, or a Status.
        """
        ...
