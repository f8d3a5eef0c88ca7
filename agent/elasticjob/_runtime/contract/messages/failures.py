"""How workers and worker pods fail, and how a job ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticjob._runtime.contract.text import printable


class FailureClass(str, Enum):
    """Classes of failures of a worker, or of its whole worker pod."""

    USER_ERROR = "UserError"
    """The training program failed: an exception, a non-zero exit code, a crash, a condition of spec.logRules."""
    OOM_KILLED = "OOMKilled"
    """The kernel killed a process at the container's memory limit."""
    KILLED = "Killed"
    """A signal from outside ended the worker."""
    COLLECTIVE_FAILED = "CollectiveFailed"
    """A collective failed because a peer failed. It is the root cause only if no other failure is known."""
    HANG = "Hang"
    """The worker made no progress within the progress timeout."""
    NODE_LOST = "NodeLost"
    """The worker pod, or the connection to its agent, was lost."""
    PREEMPTED = "Preempted"
    """Kubernetes ended the pod: preemption, eviction, drain, or shutdown of its Node."""
    START_ERROR = "StartError"
    """The command could not be executed."""
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    """The worker pod cannot train on its Node: a GPU, memory, disk or clock problem, or a worker that SIGKILL does not
    end."""


@dataclass(frozen=True)
class Failure:
    """One failure of a worker, or of a whole worker pod."""

    kind: FailureClass
    pod: str
    """Name of the pod."""
    time: float
    """When it happened; Unix seconds."""
    rank: int | None = None
    """Global rank of the worker; None if the whole worker pod failed, or if no worker existed yet."""
    exit_code: int | None = None
    """None if the worker did not exit by itself."""
    signal: str = ""
    """Name of the signal that ended the worker, e.g. `SIGKILL`; empty if it exited."""
    exception: str = ""
    """Type name of the exception; empty if unknown."""
    message: str = ""
    """The exception's message, or the last lines of the worker's standard error. At most 1024 characters."""
    step: int | None = None
    """Hangs only: the last step that the worker reported; None if it reported none."""
    waits_for_peers: bool = False
    """Hangs only: the worker's stack shows that it waits in torch, where ranks wait for each other."""
    suspected: bool = False
    """DEVICE_UNHEALTHY only: a healthy Node may show the same. The first time, the job only moves to another Node."""
    ended_ranks: tuple[int, ...] = ()
    """COLLECTIVE_FAILED only: global ranks of workers that had ended with success before. The coordinator adds
    them."""
    log_rule: str = ""
    """The rule of spec.logRules that has a condition which the worker's output met; empty for other failures."""
    ends_job: bool = False
    """The action of that condition is FailJob."""
    stage: int = 0
    """The launcher of the pod's command whose rank it was, from 2 on; 0: the first one, or none. The coordinator adds
    it."""

    def __post_init__(self) -> None:
        # A worker wrote these texts. They reach terminals, and the API server, which refuses text that is not Unicode.
        object.__setattr__(self, "exception", printable(self.exception))
        object.__setattr__(self, "message", printable(self.message))


class Outcome(str, Enum):
    """How a job ended, or the part that one agent had in it."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    LEFT = "Left"
    """The agent left, for example because its pod was drained. The job goes on without it."""
    SUPERSEDED = "Superseded"
    """A newer pod has this agent's index."""
    ERROR = "Error"
    """The agent could not do its work, e.g. it never reached the store."""
