"""Watch the Nodes for warnings, and for the labels that say where a machine is.

kopf does not watch them: it copies each object several times, and the Node of each kubelet changes every few minutes or
seconds. An event costs the parsing of its JSON here. Of a Node its warning and its place are kept, if it has them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.kube import NODES, KubeError, Resource
from elasticjob_operator.model.nodes import NoticeKeys, parse_topology, parse_warning
from elasticjob_operator.model.raw import integer, mapping, text
from elasticjob_operator.model.unreadable import parse_or_skip
from elasticjob_operator.watch_cache import WatchCache

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 1.0
"""Seconds until the watch is opened again after it has ended; each failure in a row doubles it."""
LONGEST_RETRY_SECONDS = 60.0
REFUSED_RETRY_SECONDS = 300.0
"""The same while the operator has no permission."""
_NO_PERMISSION = (401, 403)
_ADVICE = "The chart's values nodeWarnings.enabled and topologyLabels permit the operator to watch Nodes"
_GONE = 410
"""HTTP status, and code of an event: the API server does not have the events from this resourceVersion on any more."""


class NodeApi(Protocol):
    """The call of the API server that this module needs."""

    def watch(self, resource: Resource, version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events from this resourceVersion on; empty: first ADDED for each object, and then a BOOKMARK."""
        ...


async def watch_nodes(
    api: NodeApi,
    keys: NoticeKeys | None,
    cache: WatchCache,
    topology_labels: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
) -> None:
    """Hand the warnings and the places of Nodes to the cache until cancelled. Without the permission, log that once,
    and go on. `keys`: None if there are to be no warnings. `clock`: that of the operator, Unix seconds.

    A Node that is deleted while the watch begins anew keeps its warning. This has no effect: it has no pods, and one of
    its name that comes later is delivered.
    """
    version, failures, refused = "", 0, False
    while True:
        try:
            async for event in api.watch(NODES, version):
                failures, refused = 0, False
                version = _take_over(event, keys, cache, topology_labels, clock())
            delay = FIRST_RETRY_SECONDS
        except KubeError as error:
            failures += 1
            delay = doubling_delay(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, failures)
            if error.status == _GONE:
                version = ""
            elif error.status in _NO_PERMISSION:
                cache.set_nodes_watched(False)
                delay = REFUSED_RETRY_SECONDS
                if not refused:
                    log.warning("warnings and topology of nodes are unknown: %s. %s", error, _ADVICE)
                refused = True
            elif failures == 1:
                log.warning("the watch on nodes ended and is opened again: %s", error)
        await asyncio.sleep(delay)


def _take_over(
    event: dict[str, Any], keys: NoticeKeys | None, cache: WatchCache, topology_labels: Sequence[str], now: float
) -> str:
    """Hand one event to the cache; return the resourceVersion from which to watch on, empty to begin anew."""
    kind, node = text(event, "type"), mapping(event, "object")
    if kind == "ERROR":
        if integer(node, "code") != _GONE:
            log.warning("the API server ended the watch on nodes: %s", text(node, "message"))
        return ""
    if kind == "BOOKMARK":
        cache.set_nodes_watched(keys is not None)
    elif kind == "DELETED":
        cache.see_node(text(node, "metadata", "name"), None)
    else:
        name = text(node, "metadata", "name")
        before = cache.warnings((name,)).get(name)
        warning, problem = None, ""
        if keys is not None:
            warning, problem = parse_or_skip(lambda raw: parse_warning(raw, keys, now, before), "Node", node)
        # What is known of a Node that cannot be read stays: its pods still run there.
        cache.see_node(name, before if problem else warning, parse_topology(node, topology_labels))
    return text(node, "metadata", "resourceVersion")
