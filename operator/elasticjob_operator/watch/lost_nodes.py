"""Nodes that a job avoids because they were lost, until their kubelets renew their Leases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticjob_operator.backoff import growing_interval
from elasticjob_operator.model.job.status import AvoidedNode

FIRST_RETURN_CHECK = 5.0
"""Seconds between two reads of the Lease of a node that was just lost; the interval grows with the time since then."""
LONGEST_RETURN_CHECK = 300.0


@dataclass(frozen=True)
class SeenLease:
    """The Lease of one kubelet. Times are Unix seconds of the operator's clock."""

    renew_time: str
    """As the kubelet wrote it; empty if the node has no Lease."""
    since: float
    """Since when the operator has read this `renew_time`; 0 if the node has no Lease."""
    read_at: float


@dataclass(frozen=True)
class _LostNode:
    entry: float
    """`since` of the entry in status. It identifies the loss: a node may be lost again."""
    since: float
    """When this operator first saw that the job avoids the node."""
    first: SeenLease | None = None
    """The Lease as first read after that."""
    last: SeenLease | None = None
    next_read: float = 0.0


@dataclass
class LostNodes:
    """The nodes that one job avoids because they were lost, and whether their kubelets are back."""

    _nodes: dict[str, _LostNode] = field(default_factory=dict)

    def max_ages(self, avoided: Iterable[AvoidedNode], now: float) -> dict[str, float]:
        """Take the nodes that the job avoids; return those that were lost as `NodeLeases.read` wants them."""
        lost = {node.name: node.since for node in avoided if node.lost and node.name}
        self._nodes = {name: self._known(name, entry) or _LostNode(entry, now) for name, entry in lost.items()}
        return {name: 0.0 if now >= node.next_read else math.inf for name, node in self._nodes.items()}

    def _known(self, name: str, entry: float) -> _LostNode | None:
        node = self._nodes.get(name)
        return node if node is not None and node.entry == entry else None

    def record(self, read: Mapping[str, SeenLease], now: float) -> None:
        """Record what `NodeLeases.read` returned."""
        self._nodes = {name: _after_read(node, read.get(name), now) for name, node in self._nodes.items()}

    def returned(self) -> frozenset[str]:
        """Return the nodes whose kubelet has renewed its Lease since they were lost."""
        return frozenset(
            name for name, node in self._nodes.items()
            if node.first and node.last and node.last.renew_time not in (node.first.renew_time, "")
        )  # fmt: skip

    def next_reads(self) -> dict[str, float]:
        """Return when the Lease of each node must be read again, Unix seconds."""
        return {name: node.next_read for name, node in self._nodes.items()}


def _after_read(node: _LostNode, lease: SeenLease | None, now: float) -> _LostNode:
    next_read = node.next_read
    if now >= next_read:
        next_read = now + growing_interval(now - node.since, FIRST_RETURN_CHECK, LONGEST_RETURN_CHECK)
    return replace(node, first=node.first or lease, last=lease or node.last, next_read=next_read)
