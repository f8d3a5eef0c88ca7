"""Leases of kubelets, as this operator sees them change.

A kubelet renews its Lease every 10 s. The kubelet's host writes the time of the renewal; the operator does not compare
it with its own clock. It measures for how long it has read the same time, as leader election does. An operator that
reads a Lease for the first time does not know how old it is, and counts from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from elasticjob_operator.kube import LEASES, KubeApi, KubeError, NotFound, Refused
from elasticjob_operator.model.cluster.raw import text
from elasticjob_operator.watch.lost_nodes import SeenLease

log = logging.getLogger(__name__)

NAMESPACE = "kube-node-lease"
_MAX_LEASES = 10_000


class NodeLeases:
    """The Leases that the operator has read. All jobs share them, so that a node of many jobs is read once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, SeenLease] = {}

    async def read(self, api: KubeApi, nodes: Mapping[str, float]) -> dict[str, SeenLease]:
        """Return the Leases of the nodes, without those that the operator may not read.

        `nodes`: by name, how old in seconds a previous read may be; an older one is repeated.
        """
        now = self._clock()
        due = [
            name for name in sorted(nodes) if name not in self._seen or now - self._seen[name].read_at >= nodes[name]
        ]
        await asyncio.gather(*(self._read(api, name) for name in due))
        return {name: self._seen[name] for name in nodes if name in self._seen}

    async def _read(self, api: KubeApi, node: str) -> None:
        try:
            renew_time = text(await api.get(LEASES, NAMESPACE, node), "spec", "renewTime")
        except NotFound:
            renew_time = ""
        except Refused as error:
            log.warning("the operator cannot read the Lease of node %s: %s", node, error)
            return
        except KubeError:
            # Kubelets cannot renew their Leases either: that time must not count as their silence.
            self._seen.clear()
            raise
        now, before = self._clock(), self._seen.get(node)
        same = before is not None and before.renew_time == renew_time
        since = before.since if before is not None and same else now
        if len(self._seen) >= _MAX_LEASES:
            self._seen.clear()
        self._seen[node] = SeenLease(renew_time, since if renew_time else 0.0, now)
