"""A simulated watch on an API server, for model tests of the operator: its events arrive late, but in their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elasticjob._runtime.contract.names import Label
from elasticjob_operator.kube import JOBS, PODS, Resource
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.world import Api, copied

Raw = dict[str, Any]


@dataclass
class Watch:
    """A watch on jobs, on Workloads, and on pods with a job's label."""

    api: Api
    cache: WatchCache
    _last: dict[tuple[Resource, str], Raw] = field(default_factory=dict)
    """The newest recorded state of each object, by UID."""
    _queue: deque[tuple[float, Resource, Raw, bool]] = field(default_factory=deque)
    """Events that were not delivered yet: when each was recorded, its object, and whether that is deleted."""
    lost: int = 0
    """Events that the next `record` drops, as a watch that connects again may."""

    def record(self) -> None:
        """Record the events of all changes since the last call."""
        now = {
            (kind, raw["metadata"]["uid"]): raw for (kind, _), raw in self.api.objects.items() if _watched(kind, raw)
        }
        gone = [(kind, self._last[kind, uid], True) for kind, uid in self._last if (kind, uid) not in now]
        changed = [(k[0], raw, False) for k, raw in now.items() if self._last.get(k) != raw]
        for kind, raw, deleted in gone + changed:
            # The simulation changes pods in place: the event is what gives the change its resourceVersion.
            if not deleted and kind is PODS:
                raw["metadata"]["resourceVersion"] = self.api.next_version()
            if self.lost:
                self.lost -= 1
            else:
                self._queue.append((self.api.now, kind, copied(raw), deleted))
        known = self._last
        self._last = {k: known[k] if known.get(k) == raw else copied(raw) for k, raw in now.items()}

    def deliver(self, most: int | None = None, *, age: float = 0.0) -> None:
        """Deliver the oldest events that were recorded `age` seconds ago or before; at most this many; None: all."""
        for _ in range(len(self._queue) if most is None else min(most, len(self._queue))):
            if self._queue[0][0] + age > self.api.now:
                return
            _, kind, raw, deleted = self._queue.popleft()
            see = {JOBS: self.cache.see_job, KUEUE_WORKLOADS: self.cache.see_workload, PODS: self.cache.see_pod}
            see[kind](raw, deleted)


def _watched(kind: Resource, raw: Raw) -> bool:
    labelled = kind in (PODS, KUEUE_WORKLOADS) and Label.JOB_NAME in raw["metadata"].get("labels", {})
    return kind is JOBS or labelled
