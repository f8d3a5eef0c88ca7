"""Pods of a job, reduced to the fields that decisions depend on.

A pod ends when its trainer container ends: sidecars may run for ever.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elasticjob.contract import codec
from elasticjob.contract.messages import Outcome, Termination
from elasticjob.contract.names import GROUP, Label
from elasticjob_operator.model.raw import Raw, integer, mapping, moment, objects, text
from elasticjob_operator.model.spec import TRAINER

AVOIDED_NODES = f"{GROUP}/avoids"
"""Annotation of a pod: the nodes on which it must not be placed, comma-separated."""

_IMAGE_ERRORS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_START_ERRORS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


@dataclass(frozen=True)
class TrainerEnd:
    """How a pod's trainer ended."""

    exit_code: int | None
    """None if no container ran, for example after an eviction."""
    reason: str
    message: str
    time: float
    """Unix seconds; 0 if no container ran."""
    termination: Termination | None = None
    """The agent's termination message. Untrusted; None if it is missing or unreadable."""

    @property
    def outcome(self) -> Outcome | None:
        return self.termination.outcome if self.termination else None

    @property
    def signal(self) -> str:
        """The name of the signal that ended the container, such as `SIGKILL`; empty if none did."""
        code = self.exit_code or 0
        try:
            return signal.Signals(code - 128).name if code > 128 else ""
        except ValueError:
            return ""


@dataclass(frozen=True)
class Pod:
    """A worker pod or a store pod."""

    name: str
    uid: str
    index: int
    """The number of a worker pod in its job; 0 for a store pod."""
    incarnation: int
    phase: str = "Pending"
    node: str = ""
    """Empty until the pod is scheduled."""
    ip: str = ""
    ready: bool = False
    created: float = 0.0
    """Unix seconds."""
    deleting: float | None = None
    """When the grace period of its deletion ends, Unix seconds; None if the pod is not being deleted."""
    unschedulable: str = ""
    """The scheduler's message when it found no node."""
    image_error: str = ""
    """The kubelet's message when it cannot pull an image."""
    stuck: str = ""
    """The kubelet's message when it cannot start a container for another reason."""
    disrupted: str = ""
    """The reason of a DisruptionTarget condition: eviction, preemption or taint."""
    avoided_nodes: frozenset[str] = frozenset()
    end: TrainerEnd | None = None
    """None until the trainer has ended."""

    @property
    def live(self) -> bool:
        """Whether the pod has neither ended nor is being deleted."""
        return self.end is None and self.deleting is None

    @property
    def running(self) -> bool:
        return self.live and self.phase == "Running"


def parse_pod(raw: Raw) -> Pod:
    """Return a pod that has the operator's labels."""
    status = mapping(raw, "status")
    statuses = [*objects(status, "initContainerStatuses"), *objects(status, "containerStatuses")]
    avoided = text(raw, "metadata", "annotations", AVOIDED_NODES)
    return Pod(
        name=text(raw, "metadata", "name"),
        uid=text(raw, "metadata", "uid"),
        index=_label(raw, Label.INDEX),
        incarnation=_label(raw, Label.INCARNATION),
        phase=text(status, "phase") or "Pending",
        node=text(raw, "spec", "nodeName"),
        ip=text(status, "podIP"),
        ready=_condition(status, "Ready", "True") is not None,
        created=moment(raw, "metadata", "creationTimestamp") or 0.0,
        deleting=moment(raw, "metadata", "deletionTimestamp"),
        unschedulable=_unschedulable(status),
        image_error=next(filter(None, map(_image_error, statuses)), ""),
        stuck=next(filter(None, map(_start_error, statuses)), ""),
        disrupted=text(_condition(status, "DisruptionTarget", "True") or {}, "reason"),
        avoided_nodes=frozenset(filter(None, avoided.split(","))),
        end=_end(raw),
    )


def _label(raw: Raw, name: str) -> int:
    value = text(raw, "metadata", "labels", name)
    return int(value) if value.isascii() and value.isdigit() else 0


def _condition(status: Raw, kind: str, value: str) -> Raw | None:
    matching = (c for c in objects(status, "conditions") if text(c, "type") == kind and text(c, "status") == value)
    return next(matching, None)


def _unschedulable(status: Raw) -> str:
    scheduled = _condition(status, "PodScheduled", "False")
    if scheduled is None or text(scheduled, "reason") != "Unschedulable":
        return ""
    return text(scheduled, "message") or "the scheduler found no node"


def _image_error(container: Raw) -> str:
    waiting = mapping(container, "state", "waiting")
    if text(waiting, "reason") not in _IMAGE_ERRORS:
        return ""
    return f"{text(container, 'image')}: {text(waiting, 'message') or text(waiting, 'reason')}"


def _start_error(container: Raw) -> str:
    waiting = mapping(container, "state", "waiting")
    if text(waiting, "reason") not in _START_ERRORS:
        return ""
    return f"container {text(container, 'name')}: {text(waiting, 'reason')}: {text(waiting, 'message')}"


def _end(raw: Raw) -> TrainerEnd | None:
    status = mapping(raw, "status")
    names = [text(c, "name") for c in objects(raw, "spec", "containers")]
    trainer = TRAINER if TRAINER in names else next(iter(names), "")
    container = next((c for c in objects(status, "containerStatuses") if text(c, "name") == trainer), {})
    terminated = mapping(container, "state", "terminated")
    if terminated and text(raw, "spec", "restartPolicy") != "Always":
        return _container_end(terminated)
    if text(status, "phase") not in ("Failed", "Succeeded"):
        return None
    return TrainerEnd(None, text(status, "reason") or text(status, "phase"), text(status, "message"), 0.0)


def _container_end(terminated: Raw) -> TrainerEnd:
    message = text(terminated, "message")
    return TrainerEnd(
        exit_code=integer(terminated, "exitCode"),
        reason=text(terminated, "reason"),
        message=message[-1024:],
        time=moment(terminated, "finishedAt") or 0.0,
        termination=_termination(message),
    )


def _termination(message: str) -> Termination | None:
    try:
        return codec.parse(Termination, codec.loads(message.encode()))
    except codec.MessageError:
        return None
