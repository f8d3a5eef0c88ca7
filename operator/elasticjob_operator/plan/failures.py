"""Failures as status tells them."""

from __future__ import annotations

from typing import Any

from elasticjob.contract.messages import Failure, FailureClass
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.plan.pod_decisions import PodDecision, ReplacePod, describe_end

MESSAGE_LENGTH = 1024


def worker_record(failure: Failure, node: str) -> dict[str, Any]:
    """A worker's failure as its agent reported it; `node` is where its pod ran, if known."""
    return _record(
        time=timestamp(failure.time),
        pod=failure.pod,
        node=node,
        rank=failure.rank,
        exitCode=failure.exit_code,
        signal=failure.signal,
        reason=failure.exception or failure.signal or _NAMED.get(failure.kind, "Error"),
        **{"class": failure.kind.value},
        exception=failure.exception,
        message=failure.message,
    )


_NAMED = {FailureClass.HANG: "HangDetected", FailureClass.DEVICE_UNHEALTHY: "DeviceUnhealthy"}
"""Failures that leave neither an exception nor a signal."""


def pod_record(pod: Pod, now: float) -> dict[str, Any]:
    """The failure of a pod whose agent could not report one."""
    end = pod.end
    if end is None:
        raise ValueError(f"{pod.name} has not ended")
    said = end.termination.failure if end.termination else None
    if said is not None:
        return worker_record(said, pod.node)
    kind = FailureClass.OOM_KILLED if end.reason == "OOMKilled" else FailureClass.KILLED
    return _record(
        time=timestamp(end.time or now),
        pod=pod.name,
        node=pod.node,
        exitCode=end.exit_code,
        signal=end.signal,
        reason=end.reason or "Error",
        **{"class": kind.value},
        message=(end.termination.message if end.termination else end.message) or f"the pod ended: {describe_end(pod)}",
    )


def uncharged_record(decision: PodDecision, now: float) -> dict[str, Any] | None:
    """What Kubernetes, or its node, did to a pod that is replaced; None where a person or the job itself did it."""
    pod, verdict = decision.pod, decision.action
    if pod is None or not isinstance(verdict, ReplacePod) or verdict.charged:
        return None
    if verdict.unhealthy is not None:
        return worker_record(verdict.unhealthy, pod.node)
    if verdict.lost_at is not None:
        return _of_pod(pod, verdict.lost_at, FailureClass.NODE_LOST, "NodeLost", verdict.reason)
    reason = pod.disrupted or (pod.end.reason if pod.end else "")
    kind = _FATES.get(reason) or (FailureClass.PREEMPTED if pod.disrupted else None)
    if kind is None and pod.end is not None and pod.end.exit_code is None:
        kind = FailureClass.START_ERROR
    if kind is None:
        return None
    at = (pod.end.time if pod.end else 0.0) or now
    return _of_pod(pod, at, kind, reason, (pod.end.message if pod.end else "") or verdict.reason)


_FATES = {
    "Evicted": FailureClass.PREEMPTED,
    "Preempting": FailureClass.PREEMPTED,
    "Terminated": FailureClass.PREEMPTED,
    "NodeShutdown": FailureClass.PREEMPTED,
    "DeletionByPodGC": FailureClass.NODE_LOST,
    "NodeLost": FailureClass.NODE_LOST,
}
"""By reasons of kubelets (status.reason: eviction, room made for a critical pod, a node that shuts down) and of
DisruptionTarget conditions; one of any other reason means that the pod was taken too."""


def _of_pod(pod: Pod, at: float, kind: FailureClass, reason: str, message: str) -> dict[str, Any]:
    known = {"time": timestamp(at), "pod": pod.name, "node": pod.node, "class": kind.value}
    return _record(**known, reason=reason, message=message)


def describe_record(record: dict[str, Any]) -> str:
    """One sentence for people."""
    rank = f"rank {record['rank']} in " if "rank" in record else ""
    node = f" on {record['node']}" if record.get("node") else ""
    code = f" (exit code {record['exitCode']})" if "exitCode" in record and not record.get("signal") else ""
    message = f": {record['message']}" if record.get("message") else ""
    return f"{rank}{record.get('pod', 'a pod')}{node} failed with {record.get('reason', 'Error')}{code}{message}"


def _record(**values: Any) -> dict[str, Any]:
    record = {name: value for name, value in values.items() if value not in (None, "")}
    if "message" in record:
        record["message"] = record["message"][:MESSAGE_LENGTH]
    return record
