"""To how many stores this operator has lost its link, over all jobs: a sign that its own network is the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elasticjob_operator.model.observed import JobKey, Observed, ReachedStores
from elasticjob_operator.plan.context import STORE_UNRESPONSIVE_SECONDS

REPLACED_SECONDS = 60.0
"""Seconds for which a replaced store counts as lost, unless its successor is reached before."""
RATE_SECONDS = 10.0
"""Seconds in which `ReachedStores.replaced` counts."""


@dataclass
class StoreReachability:
    """The stores of all jobs, as last observed. Times are Unix seconds of the operator's clock."""

    _reached: dict[JobKey, str] = field(default_factory=dict)
    """The node of the store, for each job whose store the operator reaches."""
    _lost: dict[JobKey, str] = field(default_factory=dict)
    """The same for jobs whose store is ready, as its kubelet reports, and that the operator does not reach."""
    _replaced: dict[JobKey, tuple[str, float]] = field(default_factory=dict)
    """For jobs whose store was replaced because it was unresponsive: its node, and when."""

    def record(self, key: JobKey, observed: Observed, now: float) -> None:
        """Record the state of one job's store."""
        self._reached.pop(key, None)
        self._lost.pop(key, None)
        incarnation = observed.job.status.store_incarnation
        pod = next((p for p in observed.stores if p.incarnation == incarnation), None)
        link = observed.link
        known = link.report is not None and link.report.incarnation == incarnation
        if pod is None or not (pod.running and pod.ready):
            return
        if link.connected and known:
            self._reached[key] = pod.node
            self._replaced.pop(key, None)
        elif not link.connected and (known or now - link.since >= STORE_UNRESPONSIVE_SECONDS):
            self._lost[key] = pod.node

    def record_links(self, connected: Callable[[JobKey], bool]) -> None:
        """Record which links are open now, also those of jobs that were not reconciled since their link was lost."""
        for key in [key for key in self._reached if not connected(key)]:
            self._lost[key] = self._reached.pop(key)

    def record_replacement(self, key: JobKey, node: str, now: float) -> None:
        """Record that the job's store on this node is replaced because it is unresponsive."""
        self._lost.pop(key, None)
        self._replaced[key] = (node, now)

    def forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._reached.pop(key, None)
        self._lost.pop(key, None)
        self._replaced.pop(key, None)

    def reach(self, now: float) -> ReachedStores:
        """Return how many stores the operator reaches."""
        self._replaced = {k: (n, at) for k, (n, at) in self._replaced.items() if now - at < REPLACED_SECONDS}
        reached = set(self._reached.values())
        lost = {*self._lost.values(), *(node for node, _ in self._replaced.values())} - reached
        replaced = sum(now - at < RATE_SECONDS for _, at in self._replaced.values())
        return ReachedStores(len(lost), len(reached), replaced)
