"""Failures as records for status, and their one-line summaries for Events and conditions."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.failures.failure_text import (
    MAX_MESSAGE,
    describe_cause,
    describe_out_of_memory,
    failure_reason,
    in_stage,
)
from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob_operator.model.cluster.pods import POD_DEADLINE, Pod
from elasticjob_operator.model.cluster.raw import integer, timestamp
from elasticjob_operator.plan.pods.node_warnings import EVICTION_REQUESTED
from elasticjob_operator.plan.pods.pod_decisions import PodDecision, ReplacePod, describe_end, did_not_start

NODE_TERMINATING = "NodeTerminating"
"""Reason of a pod that has left a node whose end is announced, and of the Event about it."""

_CLASS_BY_REASON = {
    "Evicted": FailureClass.PREEMPTED,
    "Preempting": FailureClass.PREEMPTED,
    "Terminated": FailureClass.PREEMPTED,
    "NodeShutdown": FailureClass.PREEMPTED,
    "Shutdown": FailureClass.PREEMPTED,
    "DeletionByPodGC": FailureClass.NODE_LOST,
    "NodeLost": FailureClass.NODE_LOST,
}
"""Keyed by kubelets' reasons (status.reason: eviction, preemption for a critical pod, node shutdown) and by reasons of
DisruptionTarget conditions. A DisruptionTarget condition of any other reason means PREEMPTED."""


_UNKNOWN_STOP = (
    "a signal from outside ended the agent, although Kubernetes did not take the pod away: its kubelet stopped it for "
    "its own fault (a livenessProbe, startupProbe or postStart hook failed: see the Events of the pod), or "
    "a process in the pod sent the signal"
)
"""Message about a pod that left after a signal, where no Event of its kubelet says why."""


def worker_record(failure: Failure, node: str) -> dict[str, Any]:
    """Return the record of a failure that an agent reported; `node` is the node of its pod, empty if unknown."""
    return _record(
        time=timestamp(failure.time),
        pod=failure.pod,
        node=node,
        rank=failure.rank,
        exitCode=failure.exit_code,
        signal=failure.signal,
        reason=failure_reason(failure),
        **{"class": failure.kind.value},
        exception=failure.exception,
        message=failure.message,
        stage=failure.stage or None,
    )


def pod_record(pod: Pod, now: float) -> dict[str, Any]:
    """Return the record of a pod that failed: its agent's report if there is one, else what Kubernetes reports."""
    end = pod.end
    if end is None:
        raise ValueError(f"{pod.name} has not ended")
    failure = end.termination.failure if end.termination else None
    if failure is not None and not end.left_on_signal:
        return worker_record(failure, pod.node)
    kind = FailureClass.OOM_KILLED if end.reason == "OOMKilled" else FailureClass.KILLED
    message = end.termination.message if end.termination else end.message
    if end.own_fault:
        message = end.message
    elif end.left_on_signal:
        message = _UNKNOWN_STOP
    if kind is FailureClass.OOM_KILLED:
        message = describe_out_of_memory(pod.memory_limit, unlimited=not pod.memory_limit)
    return _record(
        time=timestamp(end.time or now),
        pod=pod.name,
        node=pod.node,
        exitCode=end.exit_code,
        signal=end.signal,
        reason=end.reason or "Error",
        **{"class": kind.value},
        message=message or f"the pod ended: {describe_end(pod)}",
    )


def start_record(pod: Pod, now: float) -> dict[str, Any]:
    """Return the record of a pod that did not start, or that its kubelet ended for its own use or its deadline."""
    end = pod.end
    if end is None:
        raise ValueError(f"{pod.name} has not ended")
    time = end.time or now
    if end.reason == "Evicted":
        return _uncharged(pod, time, FailureClass.PREEMPTED, "Evicted", end.message or end.start_failure)
    if end.reason == POD_DEADLINE:
        return _uncharged(pod, time, FailureClass.START_ERROR, POD_DEADLINE, end.start_failure)
    return _uncharged(pod, time, FailureClass.START_ERROR, "InitContainerFailed", end.start_failure)


def uncharged_record(decision: PodDecision, now: float) -> dict[str, Any] | None:
    """Return the record of a pod that Kubernetes or its node ended; None if a user or the job itself ended it.

    A pod that did not start has its record already (`start_record`, when it failed); it is replaced later.
    """
    pod, action = decision.pod, decision.action
    if pod is None or not isinstance(action, ReplacePod) or action.charged:
        return None
    if did_not_start(pod):
        return None
    if action.unhealthy is not None:
        return worker_record(action.unhealthy, pod.node)
    if action.lost_at is not None:
        return _uncharged(pod, action.lost_at, FailureClass.NODE_LOST, "NodeLost", action.reason)
    if action.asked:
        return _uncharged(pod, now, FailureClass.PREEMPTED, EVICTION_REQUESTED, action.reason)
    if action.noticed:
        return _uncharged(pod, now, FailureClass.PREEMPTED, NODE_TERMINATING, action.reason)
    reason = pod.disrupted or (pod.end.reason if pod.end else "")
    kind = _CLASS_BY_REASON.get(reason) or (FailureClass.PREEMPTED if pod.disrupted else None)
    if kind is None and pod.end is not None and pod.end.exit_code is None:
        kind = FailureClass.START_ERROR
    if kind is None:
        return None
    time = (pod.end.time if pod.end else 0.0) or now
    return _uncharged(pod, time, kind, reason, (pod.end.message if pod.end else "") or action.reason)


def _uncharged(pod: Pod, time: float, kind: FailureClass, reason: str, message: str) -> dict[str, Any]:
    known = {"time": timestamp(time), "pod": pod.name, "node": pod.node, "class": kind.value}
    return _record(**known, reason=reason, message=message)


def describe_record(record: dict[str, Any]) -> str:
    """Return one line for Events and conditions: rank, pod and node, then the cause."""
    rank = f"rank {record['rank']} in " if "rank" in record else ""
    node = f" on {record['node']}" if record.get("node") else ""
    reason = str(record.get("reason", "Error"))
    cause = describe_cause(
        reason,
        str(record.get("class", reason)),
        str(record.get("message", "")),
        exception=str(record.get("exception", "")),
        signal=str(record.get("signal", "")),
        exit_code=record.get("exitCode"),
        of_worker="rank" in record,
    )
    return f"{rank}{record.get('pod', 'a pod')}{node} failed{in_stage(integer(record, 'stage'))}: {cause}"


def _record(**values: Any) -> dict[str, Any]:
    """Return the values that are known. Texts come from pods and their stores: each is cut."""
    known = {name: value for name, value in values.items() if value not in (None, "")}
    return {name: value[:MAX_MESSAGE] if isinstance(value, str) else value for name, value in known.items()}
