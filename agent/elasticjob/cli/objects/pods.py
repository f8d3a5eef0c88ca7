"""What the verbs say about the pods of a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from elasticjob._runtime.contract.names import Env, Label, Role
from elasticjob.cli.cluster.resources import KubeObject

TRAINER_ANNOTATION = "elasticjob.dev/trainer"
_FORMED = re.compile(r"\[agent\] \S+: round (\S+) formed: .* ranks (\d+)-(\d+) of \d+")
_WORKER_LINE = r"\[{role}(\d+)\]:"


def pods_selector(job: str, role: Role | None = None) -> str:
    """Return the label selector of a job's pods."""
    return f"{Label.JOB_NAME}={job}" + (f",{Label.ROLE}={role.value}" if role else "")


def pod_name(pod: KubeObject) -> str:
    return str(pod["metadata"]["name"])


def is_store(pod: KubeObject) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(Label.ROLE) == Role.STORE.value)


def pod_number(pod: KubeObject, label: str) -> int:
    """Return the value of a label such as `Label.INDEX`; 0 without it."""
    value = str(pod["metadata"].get("labels", {}).get(label, ""))
    return int(value) if value.isdigit() else 0


def in_order(pods: Iterable[KubeObject]) -> list[KubeObject]:
    """Return worker pods by index and incarnation, then the stores."""
    return sorted(pods, key=lambda p: (is_store(p), pod_number(p, Label.INDEX), pod_number(p, Label.INCARNATION)))


def main_container(pod: KubeObject) -> str:
    """Return the name of the container that trains, or that serves as the store."""
    containers = pod.get("spec", {}).get("containers") or [{"name": ""}]
    return str(pod["metadata"].get("annotations", {}).get(TRAINER_ANNOTATION) or containers[0]["name"])


def container_env(pod: KubeObject, name: str) -> str:
    """Return a variable of the main container; empty if its manifest has none."""
    wanted = main_container(pod)
    for container in pod.get("spec", {}).get("containers") or []:
        if container["name"] == wanted:
            return str(next((v.get("value", "") for v in container.get("env") or [] if v["name"] == name), ""))
    return ""


def main_status(pod: KubeObject) -> dict[str, Any]:
    """Return the status of the main container; empty before the kubelet has written one."""
    wanted = main_container(pod)
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((status for status in statuses if status.get("name") == wanted), {})


def has_log(pod: KubeObject) -> bool:
    """Return whether the main container has started, so that its log can be read."""
    state = main_status(pod).get("state") or {}
    return "running" in state or "terminated" in state


def is_active(pod: KubeObject) -> bool:
    """Return whether the pod has neither ended nor is being deleted."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed") and not pod["metadata"].get(
        "deletionTimestamp"
    )


def pod_condition(pod: KubeObject, kind: str) -> dict[str, Any]:
    """Return a condition of a pod; empty without it."""
    conditions = pod.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind), {})


def pod_state(pod: KubeObject) -> tuple[str, str]:
    """Return (state, message) of a pod: the state in a word, and what Kubernetes says about it, which may be empty."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating", ""
    scheduled = pod_condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return str(scheduled.get("reason") or "Unschedulable"), str(scheduled.get("message", ""))
    for init in status.get("initContainerStatuses") or []:
        ended = (init.get("state") or {}).get("terminated") or {}
        if (found := _blocked(init)) is not None:
            return f"Init:{found[0]}", found[1]
        if ended.get("exitCode"):
            return f"Init:{ended.get('reason', 'Error')}", str(ended.get("message", ""))
    for container in status.get("containerStatuses") or []:
        if (found := _blocked(container)) is not None:
            return found
    if status.get("phase") == "Failed":
        return _ended(pod)
    if status.get("phase") == "Running" and pod_condition(pod, "Ready").get("status") != "True":
        return "NotReady", ""
    return str(status.get("phase") or "Pending"), ""


def _blocked(status: dict[str, Any]) -> tuple[str, str] | None:
    """Return (reason, message) of a container that waits for more than its turn."""
    waiting = (status.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in (None, "PodInitializing", "ContainerCreating"):
        return None
    return str(waiting["reason"]), str(waiting.get("message", ""))


def _ended(pod: KubeObject) -> tuple[str, str]:
    status = pod.get("status", {})
    ended = (main_status(pod).get("state") or {}).get("terminated") or {}
    reason = status.get("reason") or (ended.get("reason") if ended.get("reason") != "Error" else "") or "Failed"
    code = ended.get("exitCode")
    return str(reason) if code is None else f"{reason} ({code})", str(status.get("message", ""))


def line_rank(line: str, role: str = "") -> int | None:
    """Return the rank whose worker wrote a line of a pod's log; None for lines of the agent. `role`: torch's role."""
    match = re.match(_WORKER_LINE.format(role=re.escape(role or "default")), line)
    return int(match[1]) if match else None


def formed_round(line: str) -> tuple[str, int, int] | None:
    """Return (round, first rank, last rank of the pod) of the agent's line about a new round; None for other lines."""
    match = _FORMED.match(line)
    return (match[1], int(match[2]), int(match[3])) if match else None


def ranks_in_log(lines: Sequence[str], pod: KubeObject) -> tuple[int, int] | None:
    """Return (first, last) rank of a pod in its newest round, by its last log lines; None if they do not tell."""
    role, count = container_env(pod, Env.ROLE), container_env(pod, Env.NPROC_PER_NODE)
    for line in reversed(lines):
        if (formed := formed_round(line)) is not None:
            return formed[1], formed[2]
        if (rank := line_rank(line, role)) is not None and count.isdigit() and int(count):
            first = rank - rank % int(count)
            return first, first + int(count) - 1
    return None
