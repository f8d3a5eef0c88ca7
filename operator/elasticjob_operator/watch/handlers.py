"""kopf handlers: each event of an object that is watched goes into the cache, and nowhere else.

The handlers are declared with kopf's decorators in a registry of kopf, and `watched` reads from there which resources
to watch, with which labels. `watches.py` delivers the events in place of kopf's own watches, because kopf ends all of
them when one fails for good, and its public interface does not show whether a watch works
(docs/contribute/design/operator.md#watches).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import kopf

from elasticjob._runtime.contract.names import GROUP, PLURAL, VERSION, Label
from elasticjob_operator.kube import NODES, Resource
from elasticjob_operator.kube.api import EVICTIONS, KUEUE_WORKLOADS
from elasticjob_operator.model.cluster.raw import mapping, text
from elasticjob_operator.watch.node_events import NodeEvents
from elasticjob_operator.watch.watch_cache import WatchCache
from elasticjob_operator.watch.watches import WatchedResource


def event_registry(cache: WatchCache, nodes: NodeEvents | None) -> kopf.OperatorRegistry:
    """Return the handlers. `nodes` None: Nodes are not watched. Pods come first: a list of jobs begins their work."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.event("", "v1", "pods", labels={Label.JOB_NAME: kopf.PRESENT}, registry=handlers)
    async def pod(event: Any, **_: Any) -> None:
        cache.see_pod(mapping(event, "object"), _is_deletion(event))

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def job(event: Any, **_: Any) -> None:
        cache.see_job(mapping(event, "object"), _is_deletion(event))

    if cache.kueue:
        kueue = (KUEUE_WORKLOADS.group, KUEUE_WORKLOADS.version, KUEUE_WORKLOADS.plural)

        @kopf.on.event(*kueue, labels={Label.JOB_NAME: kopf.PRESENT}, registry=handlers)
        async def workload(event: Any, **_: Any) -> None:
            cache.see_workload(mapping(event, "object"), _is_deletion(event))

    if cache.eviction_requests:
        evictions = (EVICTIONS.group, EVICTIONS.version, EVICTIONS.plural)

        @kopf.on.event(*evictions, registry=handlers)
        async def eviction(event: Any, **_: Any) -> None:
            cache.see_eviction(mapping(event, "object"), _is_deletion(event))

    if nodes is not None:
        events = nodes

        @kopf.on.event("", "v1", "nodes", registry=handlers)
        async def node(event: Any, **_: Any) -> None:
            events.see(dict(mapping(event, "object")), _is_deletion(event))

    return handlers


def watched(registry: kopf.OperatorRegistry, cache: WatchCache, nodes: NodeEvents | None) -> list[WatchedResource]:
    """Return what to watch for the handlers of this registry.

    Lists go to the cache directly, because only the cache can tell which objects are gone.
    """
    found = []
    # kopf has no public call that returns the handlers; pyproject.toml limits kopf to the versions that were read.
    for handler in registry._watching.get_all_handlers():
        selector = handler.selector
        if selector is None:
            continue
        resource = Resource(selector.group or "", selector.version or "", str(selector.any_name))
        present = ",".join(handler.labels or ())
        handle = partial(_call, handler.fn)
        if nodes is not None and resource == NODES:
            found.append(WatchedResource(resource, present, handle, nodes.list, nodes.refuse, needed=False))
        else:
            needed = resource != EVICTIONS  # the API server may not have them
            found.append(
                WatchedResource(resource, present, handle, partial(cache.list_resource, resource), needed=needed)
            )
    return found


async def _call(handler: Callable[..., Any], event: dict[str, Any]) -> None:
    result: Awaitable[None] = handler(event=event)
    await result


def _is_deletion(event: Any) -> bool:
    return text(event, "type") == "DELETED"
