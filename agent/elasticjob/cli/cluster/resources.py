"""The types of objects that the verbs read and change."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from elasticjob._runtime.contract.names import GROUP, PLURAL, VERSION

KubeObject: TypeAlias = dict[str, Any]
"""An object as the API server returns it."""

KubeObjects: TypeAlias = list[KubeObject]


class ApiResource(NamedTuple):
    """A type of objects. `group` is empty for the core API; `namespaced` is False for Nodes."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def url(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the path of an object; without a name, of the list. Without a namespace: of all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = ["namespaces", namespace] if self.namespaced and namespace else []
        return quote("/".join(part for part in (root, *scope, self.plural, name, subresource) if part))


ELASTICJOBS = ApiResource(GROUP, VERSION, PLURAL)
POD_LIST = ApiResource("", "v1", "pods")
EVENT_LIST = ApiResource("", "v1", "events")
CONFIG_MAPS = ApiResource("", "v1", "configmaps")
NODE_LIST = ApiResource("", "v1", "nodes", namespaced=False)
QUOTA_LIST = ApiResource("", "v1", "resourcequotas")
QUEUED_WORKLOADS = ApiResource("kueue.x-k8s.io", "v1beta2", "workloads")
POD_METRICS = ApiResource("metrics.k8s.io", "v1beta1", "pods")
