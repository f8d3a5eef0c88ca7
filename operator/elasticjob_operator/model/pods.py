"""Pods of a job, reduced to what decisions depend on. A pod is judged by its trainer container: sidecars never end."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elasticjob.contract import codec
from elasticjob.contract.messages import Outcome, Termination
from elasticjob.contract.names import Label
from elasticjob_operator.model.raw import Raw, integer, mapping, moment, objects, text
from elasticjob_operator.model.spec import TRAINER

AVOIDED_NODES = "elasticjob.dev/avoids"
"""Annotation of a worker pod: comma-separated nodes that it was made to stay away from."""

_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_STUCK = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


@dataclass(frozen=True)
class TrainerEnd:
    """How a pod's trainer ended. `exit_code` is None where no container had run (an eviction, say)."""

    exit_code: int | None
    reason: str
    message: str
    time: float
    termination: Termination | None = None
    """What the agent declared; untrusted, None when it declared nothing readable."""

    @property
    def outcome(self) -> Outcome | None:
        return self.termination.outcome if self.termination else None

    @property
    def signal(self) -> str:
        """`SIGKILL` and the like when the container was ended by one."""
        code = self.exit_code or 0
        try:
            return signal.Signals(code - 128).name if code > 128 else ""
        except ValueError:
            return ""


@dataclass(frozen=True)
class Pod:
    """A worker or store pod. `index` is the index of a worker, 0 for a store."""

    name: str
    uid: str
    index: int
    incarnation: int
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    ready: bool = False
    created: float = 0.0
    deleting: float | None = None
    """When its grace ends, once it is being deleted."""
    unschedulable: str = ""
    """The scheduler's words when it found no node."""
    image_error: str = ""
    """The kubelet's words when an image cannot be had."""
    stuck: str = ""
    """The kubelet's words when a container cannot be started for another reason."""
    disrupted: str = ""
    """Reason of a DisruptionTarget condition: eviction, preemption, taint."""
    avoided_nodes: frozenset[str] = frozenset()
    end: TrainerEnd | None = None

    @property
    def live(self) -> bool:
        """Neither ended nor being deleted."""
        return self.end is None and self.deleting is None

    @property
    def running(self) -> bool:
        return self.live and self.phase == "Running"


def parse_pod(raw: Raw) -> Pod:
    """A pod with the operator's labels."""
    status = mapping(raw, "status")
    statuses = [*objects(status, "initContainerStatuses"), *objects(status, "containerStatuses")]
    avoids = text(raw, "metadata", "annotations", AVOIDED_NODES)
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
        stuck=next(filter(None, map(_stuck, statuses)), ""),
        disrupted=text(_condition(status, "DisruptionTarget", "True") or {}, "reason"),
        avoided_nodes=frozenset(filter(None, avoids.split(","))),
        end=_end(raw),
    )


def _label(raw: Raw, name: str) -> int:
    value = text(raw, "metadata", "labels", name)
    return int(value) if value.isascii() and value.isdigit() else 0


def _condition(status: Raw, kind: str, value: str) -> Raw | None:
    found = (c for c in objects(status, "conditions") if text(c, "type") == kind and text(c, "status") == value)
    return next(found, None)


def _unschedulable(status: Raw) -> str:
    scheduled = _condition(status, "PodScheduled", "False")
    if scheduled is None or text(scheduled, "reason") != "Unschedulable":
        return ""
    return text(scheduled, "message") or "the scheduler found no node"


def _image_error(container: Raw) -> str:
    waiting = mapping(container, "state", "waiting")
    if text(waiting, "reason") not in _NO_IMAGE:
        return ""
    return f"{text(container, 'image')}: {text(waiting, 'message') or text(waiting, 'reason')}"


def _stuck(container: Raw) -> str:
    waiting = mapping(container, "state", "waiting")
    if text(waiting, "reason") not in _STUCK:
        return ""
    return f"container {text(container, 'name')}: {text(waiting, 'reason')}: {text(waiting, 'message')}"


def _end(raw: Raw) -> TrainerEnd | None:
    status = mapping(raw, "status")
    names = [text(c, "name") for c in objects(raw, "spec", "containers")]
    trainer = TRAINER if TRAINER in names else next(iter(names), "")
    found = (c for c in objects(status, "containerStatuses") if text(c, "name") == trainer)
    ended = mapping(next(found, {}), "state", "terminated")
    if ended and text(raw, "spec", "restartPolicy") != "Always":
        return _container_end(ended)
    if text(status, "phase") not in ("Failed", "Succeeded"):
        return None
    return TrainerEnd(None, text(status, "reason") or text(status, "phase"), text(status, "message"), 0.0)


def _container_end(ended: Raw) -> TrainerEnd:
    said = text(ended, "message")
    return TrainerEnd(
        exit_code=integer(ended, "exitCode"),
        reason=text(ended, "reason"),
        message=said[-1024:],
        time=moment(ended, "finishedAt") or 0.0,
        termination=_termination(said),
    )


def _termination(said: str) -> Termination | None:
    try:
        return codec.parse(Termination, codec.loads(said.encode()))
    except codec.MessageError:
        return None
