"""Why kubelets stopped pods for the pods' own fault, where only their Events say it: a failed probe or postStart hook.

The status of such a pod has no more than the exit code 143 or 137. The operator lists the Events of the pod once, when
it first sees the end, and does without those that take long to read. The kubelet records the Event before it stops the
container, so it is there by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob_operator.model.cluster.pods import Pod, with_own_fault
from elasticjob_operator.model.cluster.raw import Raw, moment, text

MAX_READS = 8
"""Pods of a job whose Events are read in one reconcile. Pods that end together usually have one cause."""
UNHEALTHY = "Unhealthy"
"""The kubelet's reason for a probe that failed. It reports each failure, also those that it does not act on, and those
of a readinessProbe."""
POST_START = "FailedPostStartHook"

_PROBES = {"failed liveness probe": "Liveness probe", "failed startup probe": "Startup probe"}
"""What an Event with the reason Killing says when its kubelet acts, and how the message of the probe begins."""
_AT_ONCE = 2.0
"""Seconds between the Events of a probe that fails and of the stop for it: their times are whole seconds. A kubelet of
Kubernetes 1.34 that stops the last container of a pod says "Stopping container", for whatever reason."""


@dataclass
class StopCauses:
    """The pods of one job that a signal has ended, and why."""

    _known: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The kubelet's reason and message by UID of the pod; empty where its Events do not say."""

    def to_read(self, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """Return the pods whose Events are to be read now, and forget all other pods than `pods`."""
        unknown = {pod.uid: pod for pod in pods if pod.stopped_for_unknown_reason}
        self._known = {uid: cause for uid, cause in self._known.items() if uid in unknown}
        return tuple(pod for uid, pod in unknown.items() if uid not in self._known)[:MAX_READS]

    def record(self, pod: Pod, events: Iterable[Raw]) -> None:
        """Record the Events of a pod, as `fields_of` selects them."""
        self._known[pod.uid] = stop_cause(pod, events)

    def applied(self, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """Return the pods, with the kubelet's reason and message where it has stopped them for their own fault."""
        return tuple(self._applied(pod) for pod in pods)

    def _applied(self, pod: Pod) -> Pod:
        reason, message = self._known.get(pod.uid, ("", ""))
        return pod if pod.end is None or not reason else replace(pod, end=with_own_fault(pod.end, reason, message))


def fields_of(pod: Pod) -> str:
    """Return the field selector of the Events about a pod."""
    return f"involvedObject.uid={pod.uid}"


def stop_cause(pod: Pod, events: Iterable[Raw]) -> tuple[str, str]:
    """Return the reason and the message of the Event for which the kubelet stopped the trainer; both empty if none is
    about a fault of the pod. Other containers of the pod may fail their probes too."""
    own = [e for e in events if text(e, "involvedObject", "fieldPath") == f"spec.containers{{{pod.trainer}}}"]
    newest_first = sorted(own, key=event_time, reverse=True)
    for event in newest_first:
        reason, message = text(event, "reason"), text(event, "message").strip()
        if reason == POST_START:
            return POST_START, message or "the postStart hook failed"
        if reason != "Killing":
            continue
        probe = next((begin for part, begin in _PROBES.items() if part in message), "")
        if not probe and (failed := _failed_probe(event, newest_first)):
            return UNHEALTHY, failed
        if probe:
            messages = (text(e, "message").strip() for e in newest_first if text(e, "reason") == UNHEALTHY)
            return UNHEALTHY, next((m for m in messages if m.startswith(probe)), message)
    return "", ""


def _failed_probe(killing: Raw, newest_first: Iterable[Raw]) -> str:
    """Return the message of the liveness or startup probe that failed as the kubelet stopped the trainer, or ""."""
    stopped = moment(killing, "lastTimestamp")
    for event in newest_first:
        message, failed = text(event, "message").strip(), moment(event, "lastTimestamp")
        if text(event, "reason") != UNHEALTHY or not message.startswith(tuple(_PROBES.values())):
            continue
        if stopped is not None and failed is not None and abs(stopped - failed) <= _AT_ONCE:
            return message
    return ""


def event_time(event: Raw) -> str:
    """Return when the Event was recorded last, as text that sorts by time."""
    return text(event, "lastTimestamp") or text(event, "eventTime")
