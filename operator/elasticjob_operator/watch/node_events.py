"""What the operator keeps of Nodes: their warnings, and the labels that say where a node is.

Each kubelet changes its Node every few minutes or seconds, so an event costs little: the parsing of its JSON and of the
few fields that count. A Node without a warning and a place is not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from elasticjob_operator.kube import NODES
from elasticjob_operator.model.cluster.nodes import parse_topology, parse_warning
from elasticjob_operator.model.cluster.notices import NoticeKeys
from elasticjob_operator.model.cluster.raw import text, whole_number
from elasticjob_operator.model.cluster.unreadable import ObjectGuard, parse_or_skip
from elasticjob_operator.watch.watch_cache import Lister, WatchCache


class NodeEvents:
    """Hands the warnings and the places of Nodes to the cache.

    `keys`: None if there are to be no warnings. `clock`: that of the operator, Unix seconds.
    """

    def __init__(
        self,
        cache: WatchCache,
        keys: NoticeKeys | None,
        topology_labels: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._topology_labels = topology_labels
        self._clock = clock
        self._problems: dict[str, str] = {}
        """Why Nodes cannot be read, by name: it is logged once, although a kubelet changes its Node all the time."""
        self._guard = ObjectGuard("Node")
        self._listing = asyncio.Lock()
        """Held during a list: of two at once, the older would bring back what the newer has found to be gone."""
        self._since_list: dict[str, int] = {}
        """The resourceVersion in the last event of each Node since the last list began, until it ended."""

    def see(self, raw: dict[str, Any], deleted: bool = False) -> None:
        """Record an event of the watch on Nodes."""
        name = text(raw, "metadata", "name")
        if self._listing.locked():
            self._since_list[name] = _version(raw)
        self._see(name, raw, deleted)

    def _see(self, name: str, raw: dict[str, Any], deleted: bool = False) -> None:
        if deleted:
            self._problems.pop(name, None)
            self._cache.see_node(name, None)
            return
        before = self._cache.warnings((name,)).get(name)
        warning, keys = None, self._keys
        if keys is not None:
            now, known = self._clock(), self._problems.get(name, "")
            warning, problem = parse_or_skip(lambda node: parse_warning(node, keys, now, before), "Node", raw, known)
            self._problems.pop(name, None)
            if problem:
                # What is known of it stays: its pods still run there.
                warning, self._problems[name] = before, problem
        self._cache.see_node(name, warning, parse_topology(raw, self._topology_labels))

    async def list(self, api: Lister, _namespace: str | None) -> str:
        """Record all Nodes, forget those that are gone, and return the list's resourceVersion. KubeError.

        The watch may run meanwhile. All pages show the Nodes as they were at the first one, so what an event has
        delivered since then counts.
        """
        async with self._listing:
            since = self._since_list = dict[str, int]()
            names, version = set[str](), ""
            async for page in api.pages(NODES, None):
                for raw in page.items:
                    name = text(raw, "metadata", "name")
                    names.add(name)
                    if name not in since or _version(raw) > since[name]:
                        self._guard.call(partial(self._see, name), raw)
                version = page.version
        names.update(since)
        self._cache.forget_nodes_except(names)
        self._problems = {name: problem for name, problem in self._problems.items() if name in names}
        self._cache.set_nodes_watched(self._keys is not None)
        return version

    def refuse(self) -> None:
        """Record that the operator may not watch Nodes: the warnings that it knows may be out of date."""
        self._cache.set_nodes_watched(False)


def _version(raw: dict[str, Any]) -> int:
    return whole_number(text(raw, "metadata", "resourceVersion"))
