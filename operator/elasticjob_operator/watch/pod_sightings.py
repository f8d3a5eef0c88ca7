"""When this operator first saw pods, that they run, and their deletion.

The API server's host writes a pod's time stamps, and its clock may differ from the operator's by seconds or minutes.
The operator measures durations from what it saw itself. A restarted operator starts to count again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob_operator.model.cluster.pods import Pod


@dataclass
class PodSightings:
    """First sightings of the pods of one job, by UID; Unix seconds of the operator's clock."""

    _seen: dict[str, float] = field(default_factory=dict)
    _running: dict[str, float] = field(default_factory=dict)
    _deleting: dict[str, float] = field(default_factory=dict)

    def update(self, pods: Iterable[Pod], now: float) -> tuple[Pod, ...]:
        """Return the pods with all sightings and with `deleting` on the operator's clock, and forget all other pods."""
        pods = tuple(pods)
        self._seen = {pod.uid: self._seen.get(pod.uid, now) for pod in pods}
        self._running = {p.uid: self._running.get(p.uid, now) for p in pods if p.phase == "Running"}
        self._deleting = {p.uid: self._deleting.get(p.uid, now) for p in pods if p.deleting is not None}
        return tuple(self._on_own_clock(pod) for pod in pods)

    def _on_own_clock(self, pod: Pod) -> Pod:
        deleting = None if pod.deleting is None else self._deleting[pod.uid] + pod.deletion_grace
        running = self._running.get(pod.uid, 0.0)
        return replace(pod, seen=self._seen[pod.uid], seen_running=running, deleting=deleting)
