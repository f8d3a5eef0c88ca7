"""Failures as records for status, and their one-line summaries for Events and conditions."""

from __future__ import annotations

from typing import Any

from elasticjob.contract.messages import Failure, FailureClass
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.plan.pod_decisions import PodDecision, ReplacePod, describe_end, did_not_start

MESSAGE_LENGTH = 1024
"""Characters of a failure's message that status keeps."""

NODE_TERMINATING = "NodeTerminating"
"""Reason of a pod that has left a node whose end is announced, and of the Event about it."""
REASON_BY_CLASS = {FailureClass.HANG: "HangDetected", FailureClass.DEVICE_UNHEALTHY: "DeviceUnhealthy"}
"""Reasons of failures that leave neither an exception nor a signal; the Restarting condition uses them too."""

_CLASS_BY_REASON = {
    "Evicted": FailureClass.PREEMPTED,
    "Preempting": FailureClass.PREEMPTED,
    "Terminated": FailureClass.PREEMPTED,
    "NodeShutdown": FailureClass.PREEMPTED,
    "DeletionByPodGC": FailureClass.NODE_LOST,
    "NodeLost": FailureClass.NODE_LOST,
}
"""Keyed by kubelets' reasons (status.reason: eviction, preemption for a critical pod, node shutdown) and by reasons of
DisruptionTarget conditions. A DisruptionTarget condition of any other reason means PREEMPTED."""


def worker_record(failure: Failure, node: str) -> dict[str, Any]:
    """Return the record of a failure that an agent reported; `node` is the node of its pod, empty if unknown."""
    return _record(
        time=timestamp(failure.time),
        pod=failure.pod,
        node=node,
        rank=failure.rank,
        exitCode=failure.exit_code,
        signal=failure.signal,
        reason=failure.exception or failure.signal or REASON_BY_CLASS.get(failure.kind, "Error"),
        **{"class": failure.kind.value},
        exception=failure.exception,
        message=failure.message,
    )


def pod_record(pod: Pod, now: float) -> dict[str, Any]:
    """Return the record of a pod that failed: its agent's report if there is one, else what Kubernetes reports."""
    end = pod.end
    if end is None:
        raise ValueError(f"{pod.name} has not ended")
    failure = end.termination.failure if end.termination else None
    if failure is not None:
        return worker_record(failure, pod.node)
    kind = FailureClass.OOM_KILLED if end.reason == "OOMKilled" else FailureClass.KILLED
    message = end.termination.message if end.termination else end.message
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
    """Return the record of a pod that did not start, or that was evicted for its own use."""
    end = pod.end
    if end is None:
        raise ValueError(f"{pod.name} has not ended")
    time = end.time or now
    if end.reason == "Evicted":
        return _uncharged(pod, time, FailureClass.PREEMPTED, "Evicted", end.message or end.start_failure)
    return _uncharged(pod, time, FailureClass.START_ERROR, "InitContainerFailed", end.start_failure)


def uncharged_record(decision: PodDecision, now: float) -> dict[str, Any] | None:
    """Return the record of a pod that Kubernetes or its node ended; None if a user or the job itself ended it.

    A pod that did not start has its record already: it is replaced later than it fails.
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
    return f"{rank}{record.get('pod', 'a pod')}{node} failed: {_describe_cause(record)}"


def _describe_cause(record: dict[str, Any]) -> str:
    """Return the exception with the first line of its message, or the signal, or the exit code, or the reason."""
    reason, signal = str(record.get("reason", "Error")), record.get("signal")
    line = next(iter(str(record.get("message", "")).strip().splitlines()), "")
    if record.get("exception"):
        return f"{record['exception']}: {line}" if line else str(record["exception"])
    if signal:
        return str(signal) if reason in (signal, "Error") else f"{reason} ({signal})"
    if "exitCode" in record:
        code = f"exit code {record['exitCode']}"
        # The message of a worker is the end of its log, the message of a pod is its agent's own.
        return code if "rank" in record or not line or code in line else f"{code}: {line}"
    cause = str(record.get("class", reason)) if reason == "Error" else reason
    return f"{cause}: {line}" if line else cause


def _record(**values: Any) -> dict[str, Any]:
    record = {name: value for name, value in values.items() if value not in (None, "")}
    if "message" in record:
        record["message"] = record["message"][:MESSAGE_LENGTH]
    return record
