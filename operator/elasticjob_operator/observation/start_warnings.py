"""Why pods do not start, where only Events of their kubelets say it: a missing volume, a network without addresses.

The operator does not watch Events, because a cluster has many. While a pod of the job stays on its Node without being
able to start containers, the operator lists the Events of its namespace, less and less often.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob_operator.backoff import growing_interval
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import Raw, text
from elasticjob_operator.observation.stop_causes import event_time

FIRST_READ = 10.0
"""Seconds that a pod may take to have its volumes and its network. Most have them within two; a kubelet reports a
missing one at once."""
LONGEST_INTERVAL = 120.0
"""A kubelet tries to mount a volume this often at the longest."""

FIELDS = "involvedObject.kind=Pod,type=Warning"
"""Field selector of the Events to read."""
_REASONS = (
    "FailedAttachVolume", "FailedMapVolume", "FailedMount", "FailedCreatePodSandBox", "FailedPrepareDynamicResources",
    "NetworkNotReady",
)  # fmt: skip
"""Reasons of a kubelet's Events for what comes before a pod's containers."""
_MAX_MESSAGE = 400
MAX_EVENT_PAGES = 5
"""Responses of some 200 Events that one read takes at most. Where a namespace has more Warning Events than that, a
message may lack its reason; to keep all of them would take some 5 KB of memory for each."""


@dataclass
class StartWarnings:
    """The pods of one job that do not get on to their containers, and why. Times are Unix seconds."""

    _since: dict[str, float] = field(default_factory=dict)
    """When each of these pods was first seen on its node, by UID."""
    _messages: dict[str, str] = field(default_factory=dict)
    _not_before: float = 0.0

    def take(self, pods: Iterable[Pod], now: float) -> None:
        """Take the job's pods as they are, and forget others."""
        self._since = {pod.uid: self._since.get(pod.uid, now) for pod in pods if pod.awaits_containers}

    def relevant(self, events: Iterable[Raw]) -> list[Raw]:
        """Return those of these Events that say why one of the pods waits."""
        pods, kept = self._since.keys(), _REASONS
        return [e for e in events if text(e, "reason") in kept and text(e, "involvedObject", "uid") in pods]

    def record(self, events: Iterable[Raw], now: float) -> None:
        """Record the Events that `FIELDS` selects, as read now."""
        found = sorted(self.relevant(events), key=event_time)
        newest = {text(event, "involvedObject", "uid"): _message(event) for event in found}
        self._messages = {uid: newest.get(uid, "") for uid in self._since}
        waited = now - min(self._since.values(), default=now)
        self._not_before = now + growing_interval(waited, FIRST_READ, LONGEST_INTERVAL)

    def applied(self, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """Return the pods, `stuck` where their kubelet says why they wait."""
        return tuple(replace(p, stuck=self._messages.get(p.uid, "")) if p.uid in self._since else p for p in pods)

    def next_reads(self) -> tuple[float, ...]:
        """Return when Events must be read again; empty if no pod waits."""
        return (max(min(self._since.values()) + FIRST_READ, self._not_before),) if self._since else ()


def _message(event: Raw) -> str:
    return f"{text(event, 'reason')}: {text(event, 'message').strip()}"[:_MAX_MESSAGE]
