"""Pods of a job, reduced to the fields that decisions depend on.

A pod ends when its trainer container ends: sidecars may run for ever.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, replace

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.failures.failure_rules import PodCondition
from elasticjob._runtime.contract.messages import InRound, Outcome, Termination
from elasticjob._runtime.contract.names import GROUP, ExitCode, Label, RoundId
from elasticjob_operator.model.cluster.raw import Raw, integer, mapping, moment, objects, text, whole_number
from elasticjob_operator.model.job.spec import TRAINER

AVOIDED_NODES = f"{GROUP}/avoids"
"""Annotation of a pod: the nodes on which it must not be placed, comma-separated."""
TRAINER_CONTAINER = f"{GROUP}/trainer"
"""Annotation of a worker pod: the name of its trainer. An admission webhook may have added containers before it."""

FAILED_STARTS = f"{GROUP}/failed-starts"
"""Annotation of a worker pod: how many attempts to start the job's pods had failed when it was created."""
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label of a pod: the PodGroup of the coscheduling plugin."""
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
"""Annotation of a pod: Volcano's PodGroup."""

MAX_LINE = 300
"""Characters of a failed init container's last line that messages quote."""

CONTAINER_LOST = "ContainerStatusUnknown"
"""The kubelet's reason for a container that it cannot find any more: its Node or the container runtime restarted."""
_LOST_REASONS = (CONTAINER_LOST, "Unknown")
"""The reasons for that of kubelets and of containerd. Their exit codes (137, 255) are placeholders."""
_LOST_EXIT_CODE = 255
"""containerd's placeholder where it lost a container's shim process: the kubelet's reason is "Error" then."""
POD_DEADLINE = "DeadlineExceeded"
"""The kubelet's reason for a pod that has run for the `activeDeadlineSeconds` of its template."""
UNREADABLE = "PodUnreadable"
"""Reason of the end of a pod that the operator cannot read."""
_UNREADABLE_END = "the pod has ended, and the operator cannot read how: see the condition Running and its own log"
_TAKEN = ("Terminated", "NodeShutdown", "Shutdown", "Preempting", "NodeLost")
"""Reasons in the status of a pod that its kubelet ends for the Node's sake. Newer kubelets add a DisruptionTarget
condition: the Node shuts down, or a critical pod needs the room."""
_RELEASED = "NodeLeft"
"""The reason in the termination message of an agent whose leave the coordinator has acknowledged. Its message is why
the agent left: the signal, or what the coordinator knows of the pod."""
_KILL_EXITS = (137, 143)
"""Exit codes of a container that its kubelet stops: an agent that left after SIGTERM, or SIGKILL after the grace."""
_IMAGE_ERRORS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_START_ERRORS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


@dataclass(frozen=True)
class TrainerEnd:
    """How a pod's trainer ended."""

    exit_code: int | None
    """None if no container ran, for example after an eviction, or if it is unknown (`CONTAINER_LOST`)."""
    reason: str
    message: str
    time: float
    """Unix seconds; 0 if no container ran."""
    termination: Termination | None = None
    """The agent's termination message. Untrusted; None if it is missing or unreadable."""
    round: RoundId | None = None
    """The last round that the agent started workers of; None if it started none. Untrusted."""
    start_failure: str = ""
    """Why the pod counts as one that does not start: an init container failed, or the kubelet evicted the pod for its
    own use. Empty for all other ends."""
    seconds: float = 0.0
    """How long the container ran, by its kubelet's clock; 0 if it did not run."""

    own_fault: str = ""
    """Why the kubelet stopped the pod for its own fault, such as `Unhealthy` (a livenessProbe failed): the kubelet's
    reason. Empty if it did not, or if its Events do not say so. `message` is the kubelet's then. `UNREADABLE`: it is
    not known how the pod ended."""

    @property
    def outcome(self) -> Outcome | None:
        return self.termination.outcome if self.termination else None

    @property
    def left_on_signal(self) -> bool:
        """Whether a signal from outside made the agent leave: the coordinator has not asked for it."""
        if self.termination is None:
            return self.exit_code == ExitCode.LEFT
        why = self.termination.message if self.termination.reason == _RELEASED else self.termination.reason
        # A kubelet that starts again after a reboot finds no container: the Node's end sent the signal.
        lost = self.reason in _LOST_REASONS
        return self.outcome is Outcome.LEFT and why in signal.Signals.__members__ and not lost

    @property
    def signal(self) -> str:
        """The name of the signal that ended the container, such as `SIGKILL`; empty if none did."""
        return _signal_name(self.exit_code or 0)


def _signal_name(exit_code: int) -> str:
    try:
        return signal.Signals(exit_code - 128).name if exit_code > 128 else ""
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
    seen: float = 0.0
    """When this operator first saw the pod, Unix seconds of its own clock (`PodSightings`). The pod's creationTimestamp
    is a time of another host's clock."""
    seen_running: float = 0.0
    """The same of its first sighting as running; 0 before that. Its image may have taken minutes to be pulled."""
    deleting: float | None = None
    """When the grace period of its deletion ends, Unix seconds; None if the pod is not being deleted. `parse_pod`
    returns the API server's time, `PodSightings` the time on the operator's clock."""
    deletion_grace: int = 0
    """Seconds that the pod was given when its deletion began."""
    unschedulable: str = ""
    """The scheduler's message when it found no node."""
    image_error: str = ""
    """The kubelet's message when it cannot pull an image."""
    stuck: str = ""
    """The kubelet's message when it cannot start a container for another reason, or what a container needs before."""
    disrupted: str = ""
    """Why Kubernetes takes the pod: the reason of a DisruptionTarget condition (eviction, preemption or taint), or the
    kubelet's where its node shuts down."""
    conditions: frozenset[PodCondition] = frozenset()
    avoided_nodes: frozenset[str] = frozenset()
    trainer: str = ""
    """The name of the trainer container; of a store pod, its first one."""
    memory_limit: str = ""
    """The memory limit of the trainer, such as `8Gi`; empty without one."""
    execution: int = 0
    """The execution attempt of the job that the pod is of; 0 if it is unknown."""
    failed_starts: int = 0
    """How many attempts to start the job's pods had failed when this pod was created."""
    gang: str = ""
    """The name of the gang object that the pod is a member of; empty if it is none."""
    end: TrainerEnd | None = None
    """None until the trainer has ended."""

    @property
    def live(self) -> bool:
        """Whether the pod has neither ended nor is being deleted."""
        return self.end is None and self.deleting is None

    @property
    def awaits_containers(self) -> bool:
        """Whether the pod has a node that does not start its containers yet, or says that it cannot."""
        ready = PodCondition("PodReadyToStartContainers", "True") in self.conditions
        known = self.image_error or self.stuck
        return self.live and bool(self.node) and self.phase == "Pending" and not ready and not known

    @property
    def stopped_for_unknown_reason(self) -> bool:
        """Whether a signal ended the trainer, and nothing in the pod says why: its kubelet's Events may."""
        end = self.end
        if end is None or self.deleting is not None or self.disrupted or end.start_failure or end.own_fault:
            return False
        return end.left_on_signal or (end.exit_code in _KILL_EXITS and end.reason == "Error" and end.outcome is None)

    @property
    def declares_outcome(self) -> bool:
        """Whether the pod's termination message says how the job ended."""
        return self.end is not None and self.end.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)

    @property
    def finished(self) -> bool:
        """Whether all containers have ended: Kubernetes counts the pod's resources as free."""
        return self.phase in ("Succeeded", "Failed")

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
        deleting=moment(raw, "metadata", "deletionTimestamp"),
        deletion_grace=integer(raw, "metadata", "deletionGracePeriodSeconds"),
        unschedulable=_unschedulable(status),
        image_error=next(filter(None, map(_image_error, statuses)), ""),
        stuck=next(filter(None, map(_start_error, statuses)), ""),
        disrupted=_disrupted(status),
        conditions=frozenset(PodCondition(text(c, "type"), text(c, "status")) for c in objects(status, "conditions")),
        avoided_nodes=frozenset(filter(None, avoided.split(","))),
        trainer=_trainer(raw),
        memory_limit=_memory_limit(raw),
        execution=_label(raw, Label.EXECUTION_ATTEMPT),
        failed_starts=whole_number(text(raw, "metadata", "annotations", FAILED_STARTS)),
        gang=_gang(raw),
        end=_end(raw),
    )


def minimal_pod(raw: Raw) -> Pod:
    """Return a pod that `parse_pod` cannot read, with what keeps it from being forgotten.

    It exists, so it has no successor while it runs, and it is deleted when it must go. Its end is a failure of its own:
    the budget bounds how often such pods are replaced.
    """
    phase = text(raw, "status", "phase") or "Pending"
    finished = phase in ("Failed", "Succeeded")
    return Pod(
        name=text(raw, "metadata", "name"),
        uid=text(raw, "metadata", "uid"),
        index=_label(raw, Label.INDEX),
        incarnation=_label(raw, Label.INCARNATION),
        phase=phase,
        node=text(raw, "spec", "nodeName"),
        ip=text(raw, "status", "podIP"),
        deleting=moment(raw, "metadata", "deletionTimestamp"),
        deletion_grace=integer(raw, "metadata", "deletionGracePeriodSeconds"),
        failed_starts=whole_number(text(raw, "metadata", "annotations", FAILED_STARTS)),
        gang=_gang(raw),
        end=with_own_fault(TrainerEnd(None, "", "", 0.0), UNREADABLE, _UNREADABLE_END) if finished else None,
    )


def _label(raw: Raw, name: str) -> int:
    return whole_number(text(raw, "metadata", "labels", name))


def _gang(raw: Raw) -> str:
    label = text(raw, "metadata", "labels", COSCHEDULING_LABEL)
    annotation = text(raw, "metadata", "annotations", VOLCANO_ANNOTATION)
    return label or annotation or text(raw, "spec", "schedulingGroup", "podGroupName")


def _condition(status: Raw, kind: str, value: str) -> Raw | None:
    matching = (c for c in objects(status, "conditions") if text(c, "type") == kind and text(c, "status") == value)
    return next(matching, None)


def _disrupted(status: Raw) -> str:
    disrupted = text(_condition(status, "DisruptionTarget", "True") or {}, "reason")
    reason = text(status, "reason")
    return disrupted or (reason if reason in _TAKEN else "")


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
    trainer = _trainer(raw)
    container = next((c for c in objects(status, "containerStatuses") if text(c, "name") == trainer), {})
    terminated = mapping(container, "state", "terminated")
    if terminated and text(raw, "spec", "restartPolicy") != "Always":
        end = _container_end(terminated)
        if evicted := _own_eviction(raw):
            return replace(end, reason="Evicted", message=text(status, "message"), start_failure=evicted)
        if text(status, "reason") == POD_DEADLINE:
            return with_own_fault(end, POD_DEADLINE, _deadline_message(status))
        return end
    if text(status, "phase") not in ("Failed", "Succeeded"):
        return None
    reason = text(status, "reason") or text(status, "phase")
    overdue = _deadline_message(status) if reason == POD_DEADLINE else ""
    start_failure = _own_eviction(raw) or overdue or _failed_init_container(raw)
    return TrainerEnd(None, reason, text(status, "message"), 0.0, start_failure=start_failure)


def with_own_fault(end: TrainerEnd, reason: str, message: str) -> TrainerEnd:
    """Return the end of a trainer for this reason, which is the pod's own fault."""
    return replace(end, reason=reason, message=message, own_fault=reason)


def _deadline_message(status: Raw) -> str:
    said = text(status, "message").strip().rstrip(".") or "the pod was active for longer than its deadline"
    return f"{said} (activeDeadlineSeconds of the template limits each pod; spec.activeDeadlineSeconds limits the job)"


def _own_eviction(raw: Raw) -> str:
    """Return why the kubelet evicted the pod for its own use, such as a full emptyDir; empty if it did not.

    A pod that is evicted because its node is short of something has a DisruptionTarget condition.
    """
    status = mapping(raw, "status")
    if text(status, "reason") != "Evicted" or _condition(status, "DisruptionTarget", "True") is not None:
        return ""
    return f"evicted: {text(status, 'message').strip() or 'the kubelet gave no reason'}"


def _failed_init_container(raw: Raw) -> str:
    """Return the init container that failed, its exit code and the last lines of its message; empty if none failed."""
    specs = objects(raw, "spec", "initContainers")
    sidecars = {text(c, "name") for c in specs if text(c, "restartPolicy") == "Always"}
    for container in objects(raw, "status", "initContainerStatuses"):
        terminated = mapping(container, "state", "terminated")
        code = integer(terminated, "exitCode")
        if code and text(container, "name") not in sidecars:  # those are ended because another one failed
            end = _signal_name(code) or f"exit code {code}"
            reason = text(terminated, "reason")
            killed = f"{reason}, " if reason not in ("", "Error") else ""
            # Two lines: what a container writes to stdout and to stderr reaches its log in either order.
            lines = " | ".join(text(terminated, "message").strip().splitlines()[-2:])
            described = f"init container {text(container, 'name')} failed: {killed}{end}"
            return f"{described}: {lines[:MAX_LINE]}" if lines else described
    return ""


def _trainer(raw: Raw) -> str:
    """Return the name of the trainer container."""
    names = [text(c, "name") for c in objects(raw, "spec", "containers")]
    annotated = text(raw, "metadata", "annotations", TRAINER_CONTAINER)
    return annotated or (TRAINER if TRAINER in names else next(iter(names), ""))


def _memory_limit(raw: Raw) -> str:
    trainer = _trainer(raw)
    container = next((c for c in objects(raw, "spec", "containers") if text(c, "name") == trainer), {})
    return text(container, "resources", "limits", "memory")


def _container_end(terminated: Raw) -> TrainerEnd:
    message = text(terminated, "message")
    termination = _termination(message)
    killed_in = None if termination else _killed_in(message)
    exit_code = integer(terminated, "exitCode")
    # An agent that is in a round leaves a termination message, whatever it exits with, unless it is killed (137).
    lost_in_round = killed_in is not None and exit_code == _LOST_EXIT_CODE
    lost = termination is None and (text(terminated, "reason") in _LOST_REASONS or lost_in_round)
    finished = moment(terminated, "finishedAt") or 0.0
    return TrainerEnd(
        exit_code=None if lost else exit_code,
        reason=CONTAINER_LOST if lost else text(terminated, "reason"),
        message="" if killed_in else message[-1024:],
        time=finished,
        seconds=max(0.0, finished - (moment(terminated, "startedAt") or finished)),
        termination=termination,
        round=termination.round if termination else killed_in,
    )


def _termination(message: str) -> Termination | None:
    try:
        return codec.parse(Termination, codec.loads(message.encode(errors="replace")))
    except codec.MessageError:
        return None


def _killed_in(message: str) -> RoundId | None:
    """Return the round in which an agent was killed that could write no termination message; None if it was in none."""
    with contextlib.suppress(codec.MessageError):
        return codec.parse(InRound, codec.loads(message.encode(errors="replace"))).round
    return None
