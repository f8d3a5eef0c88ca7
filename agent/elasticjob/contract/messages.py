"""Messages on the control link, and the termination message. All frozen, all JSON objects tagged by `type`.

    node ──► coordinator   Announce, Ready, WorkersStarted, WorkersFailed, WorkersSucceeded, WorkersStopped, Leaving,
                           WorkersStalled, StepReport, StepTimes, Close
    coordinator ──► node   StartRound, Standby, PlanEnd, EndRound, Closed, Finish
    operator ──► coordinator   Facts
    coordinator ──► operator   Report

Times are Unix seconds of the sender, durations are seconds. Rounds travel as `attempt.store.n`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from elasticjob.contract import codec
from elasticjob.contract.names import RoundId

PROTOCOL = 1
"""Version of the control link; peers of different versions do not talk."""

ANY_INDEX = -1
"""A node that no operator has numbered: under a stock torchrun, say."""


class FailureClass(str, Enum):
    """What kind of end a worker, or its whole node, met."""

    USER_ERROR = "UserError"
    """The program's own: an exception, an exit code, a crash."""
    OOM_KILLED = "OOMKilled"
    """By the kernel, at the container's memory limit."""
    KILLED = "Killed"
    """By a signal from outside."""
    COLLECTIVE_FAILED = "CollectiveFailed"
    """The echo of a peer's failure; the cause only where no other is known."""
    HANG = "Hang"
    """No progress within the deadline."""
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    """Kubernetes took the pod: preemption, eviction, drain, a node that shuts down."""
    START_ERROR = "StartError"
    """The command could not be executed."""
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    """The node is not fit to train: its GPU, memory, disk or clock, or a worker stuck in its kernel."""


@dataclass(frozen=True)
class Failure:
    """One worker's failure. `rank` is None where no worker existed yet or the whole node is meant."""

    kind: FailureClass
    pod: str
    time: float
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    """`SIGKILL` and the like; empty for an exit."""
    exception: str = ""
    """The exception's type name, empty if none is known."""
    message: str = ""
    """The exception's message, or the worker's last log lines. At most 1024 characters."""
    step: int | None = None
    """Of a hang: the last step that the worker reported."""
    waits_for_peers: bool = False
    """Of a hang: it looks as if the worker only waits for others."""


class Outcome(str, Enum):
    """How a job, or a node's part in it, ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    LEFT = "Left"
    SUPERSEDED = "Superseded"
    ERROR = "Error"


# ---- node to coordinator ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRound:
    """A node's part in a new round. `rank` and `role_rank` are those of its first worker."""

    round: RoundId
    group_rank: int
    group_world_size: int
    rank: int
    world_size: int
    role_rank: int
    role_world_size: int
    master_addr: str
    master_port: int
    restarts: int
    """Failures charged so far: TORCHELASTIC_RESTART_COUNT."""
    max_restarts: int
    progress_timeout: float = 0.0
    """Seconds without a step, after the first, that make a hang; 0: nobody looks."""
    hang_ends_round: bool = True
    """False: it is told, and nothing else."""


class MemberState(str, Enum):
    """What became of a node's workers in a round."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class LastMembership:
    """The last round a node was in, told to a coordinator that may not know it."""

    assignment: StartRound
    state: MemberState


@dataclass(frozen=True)
class Announce:
    """First message on every connection of a node; the same `agent_id` again is the same node coming back."""

    index: int
    """`ANY_SLOT`: the coordinator gives it the lowest that is free."""
    incarnation: int
    agent_id: str
    pod: str
    address: str
    store_port: int
    """Bound and listening: a round whose rank 0 is here uses it as its process-group store."""
    local_world_size: int
    role: str = "default"
    ready: bool = False
    membership: LastMembership | None = None
    fork_disabled_reason: str = ""
    """Why its workers start by exec; empty: they are forked from a warm process, or the user wants none."""


@dataclass(frozen=True)
class Ready:
    """Warm and healthy: this node could start workers at once. Said again when the warm process is lost."""

    fork_disabled_reason: str = ""
    """As in `Announce`."""


@dataclass(frozen=True)
class WorkersStarted:
    round: RoundId


@dataclass(frozen=True)
class WorkersFailed:
    """Sent at the first failure; `WorkersStopped` follows once no local worker is left."""

    round: RoundId
    failure: Failure


@dataclass(frozen=True)
class WorkersStalled:
    """The workers hang, and are let be. Said once for each standstill: again only after they made progress."""

    round: RoundId
    failure: Failure


@dataclass(frozen=True)
class WorkersSucceeded:
    """Every local worker exited 0. The node waits: it may have to run again."""

    round: RoundId


@dataclass(frozen=True)
class WorkersStopped:
    """No worker of the round is left on this node; `store_port` is fresh for the next round."""

    round: RoundId
    store_port: int


@dataclass(frozen=True)
class Leaving:
    """Told to go, or not fit. The node waits for `EndRound` (if a member), stops its workers, then gets `Finish`."""

    reason: str
    failure: Failure | None = None
    """Why this node is not fit to train: it asks for a successor on another machine."""


@dataclass(frozen=True)
class Close:
    """No round shall form any more (torch's `set_closed`). Only where no operator decides when the job ends."""

    reason: str


@dataclass(frozen=True)
class StepReport:
    """The answer to `PlanEnd`. Workers of this node stand still after their next step, until a last one is named."""

    round: RoundId
    step: int | None
    """The latest step that any of them may have done by then; None where not all of them report their steps."""


@dataclass(frozen=True)
class StepTimes:
    """How long a step of the round took in the last minute or so; seconds, on average."""

    round: RoundId
    step_seconds: float
    own_seconds: tuple[float, ...]
    """By local rank: the part of it in which the worker waited for no other rank."""


@dataclass(frozen=True)
class NewerStore:
    """Said instead of an `Announce` to a store that is older than one already heard of: it closes itself."""

    incarnation: int


# ---- coordinator to node ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standby:
    """Known and not in the round: wait."""

    reason: str
    redundant: bool = False
    """The round is full without this node (torch's redundancy list)."""


@dataclass(frozen=True)
class Closed:
    """No round will form any more; one that runs goes on. Nodes outside it get `Finish`."""

    reason: str


@dataclass(frozen=True)
class PlanEnd:
    """The round is to end at a step that all agree on: answer `StepReport`, at once, and hold the workers there."""

    round: RoundId
    reason: str


@dataclass(frozen=True)
class EndRound:
    """Stop the workers of `round`: SIGTERM, `grace_seconds`, SIGKILL; answer `WorkersStopped`.

    With `last_step` they stop by themselves there; another `EndRound` without it follows for those that do not.

    Keep the process-group store of the round up until `Finish` or the next `StartRound`.
    """

    round: RoundId
    grace_seconds: float
    reason: str
    planned: bool = False
    last_step: int | None = None
    dump_stacks: bool = False
    """A worker hangs: say first where those of this node stand."""


@dataclass(frozen=True)
class Finish:
    """Terminal for this node: write the termination message and exit."""

    outcome: Outcome
    reason: str
    message: str = ""


# ---- operator and coordinator ----------------------------------------------------------------------------------


class HangAction(str, Enum):
    """What follows when training stands still."""

    RESTART_GROUP = "RestartGroup"
    FAIL_JOB = "FailJob"
    EVENT = "Event"
    """It is told, and nothing else."""


@dataclass(frozen=True)
class RoundSettings:
    """The rules a coordinator works by; in the store's environment at its start, then in every `Facts`."""

    min_nodes: int
    max_nodes: int
    target: int
    """How many nodes the round should have now (replicas, within min and max)."""
    spares: int = 0
    """Nodes beyond the target that stand by, ready to take the place of one that is lost."""
    max_restarts: int = 3
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    stop_grace: float = 1.0
    graceful_shutdown: float = 120.0
    """How long a planned end may take, from its announcement to the last worker's end, before workers are killed."""
    keep_alive_interval: float = 1.0
    keep_alive_max_attempts: int = 3
    scale_up_stabilization: float = 30.0
    progress_timeout: float = 0.0
    """Of rounds to come; 0: hangs are not looked for."""
    hang_action: HangAction = HangAction.RESTART_GROUP
    """`EVENT` holds for rounds to come, as the timeout does."""

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes ({self.min_nodes}) must be at least 1")
        if self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes ({self.max_nodes}) must be at least min_nodes ({self.min_nodes})")
        if not self.min_nodes <= self.target <= self.max_nodes:
            raise ValueError(f"target ({self.target}) must be within {self.min_nodes} and {self.max_nodes}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts ({self.max_restarts}) must not be negative")
        if self.spares < 0:
            raise ValueError(f"spares ({self.spares}) must not be negative")

    @property
    def desired_pods(self) -> int:
        """How many indices have a pod. Any of their nodes may be in the round, any may stand by."""
        return self.target + self.spares


class PodState(str, Enum):
    """What Kubernetes knows of a worker pod, as far as a round cares."""

    STARTING = "starting"
    """Scheduled, not yet running."""
    RUNNING = "running"
    DRAINING = "draining"
    """Being deleted or evicted: must not be taken into a round."""
    UNSCHEDULABLE = "unschedulable"
    """Pending without a node, or its image cannot be had: nobody should wait for it."""
    LOST = "lost"
    """Running for all that Kubernetes knows, on a node that nobody hears of: it comes at once or not at all."""


@dataclass(frozen=True)
class ExpectedPod:
    """The live pod of a index. A index without a fact has no pod: nobody should wait for it."""

    index: int
    incarnation: int
    """Older incarnations of the index are dead to the job, whoever still runs one."""
    pod: str
    state: PodState


@dataclass(frozen=True)
class OperatorView:
    """All that the operator knows; each replaces the last. Words older than (lease, sequence) are dropped."""

    lease: int
    sequence: int
    settings: RoundSettings
    charged: int
    """Restarts that count, as persisted in status."""
    charged_round: RoundId | None
    """The last ended round that status has taken into account: reports up to it need not be kept."""
    pods: tuple[ExpectedPod, ...] = ()
    confirmed_request: float = 0.0
    """The `Report.asks` that this answers: who is told this is the job's only store."""
    finish: Finish | None = None
    """How the job has ended, by status: a coordinator that came after the end was declared cannot know."""


class RoundPhase(str, Enum):
    """Where the coordinator stands."""

    RECOVERING = "Recovering"
    """A successor store: hears from nodes before it decides anything."""
    GATHERING = "Gathering"
    RUNNING = "Running"
    ENDING = "Ending"
    FINISHED = "Finished"


class EndReason(str, Enum):
    """Why a round ended. Also reasons of the `Restarting` condition where they mean a restart."""

    WORKER_FAILED = "WorkerFailed"
    AGENT_LOST = "AgentLost"
    NODE_LEFT = "NodeLeft"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"
    SUCCEEDED = "Succeeded"


@dataclass(frozen=True)
class RoundEnded:
    """One ended round, kept in reports until `Facts.charged_round` has reached it."""

    round: RoundId
    reason: EndReason
    message: str
    charged: bool
    time: float
    world_size: int
    failure: Failure | None = None
    lost_pods: tuple[str, ...] = ()
    """Pods that were lost or left."""


@dataclass(frozen=True)
class RecoverySeconds:
    """Seconds, phase by phase, from a fault to the workers of the next round."""

    pods: tuple[str, ...]
    """Whose failure or loss it was."""
    detect: float
    """Until all were told; clocks of two hosts are compared here."""
    stop: float
    """Until nothing of the old round ran any more."""
    rendezvous: float
    start: float
    """Until the workers of the next round had all started."""


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for in every step, as it was when it was named. Seconds a step."""

    rank: int
    pod: str
    own_seconds: float
    """In which it waits for nobody."""
    median_seconds: float
    """The same of the other ranks."""
    time: float


@dataclass(frozen=True)
class NodeReport:
    """One connected node."""

    index: int
    incarnation: int
    pod: str
    ready: bool
    member: bool
    """Whether it is in the round that runs."""


@dataclass(frozen=True)
class Report:
    """The coordinator's whole view, sent to the operator on every change."""

    incarnation: int
    phase: RoundPhase
    reason: str
    """Why the coordinator stands where it stands, for people."""
    round: RoundId | None
    """The round that runs or ends; None while none does."""
    rounds: int
    """Rounds formed in this store's life, plus those it restored."""
    world_size: int
    """Workers in the running round; 0 while none runs."""
    formed_at: float
    """When the running round's workers had all started; 0 before."""
    nodes: tuple[NodeReport, ...] = ()
    ended_rounds: tuple[RoundEnded, ...] = ()
    outcome: Outcome | None = None
    """SUCCEEDED or FAILED once declared."""
    failure: Failure | None = None
    """The root cause of a FAILED outcome."""
    lost_pods: tuple[str, ...] = ()
    """Pods whose link is gone while `Facts` still call them running."""
    unhealthy: tuple[Failure, ...] = ()
    """One of each pod that asked to be replaced on another machine and that `Facts` still list."""
    active: int = 0
    """Nodes in the running round."""
    recovery: RecoverySeconds | None = None
    """From the last fault, once it is over."""
    confirmation_request: float = 0.0
    """When this coordinator asked whether it is the job's only store; 0: it does not ask."""
    half_missing_round: RoundId | None = None
    """The last round, where it asks because just half of that is missing."""
    fork_disabled_reason: str = ""
    """Why workers of the round start by exec, by the word of the first node that says so; empty: none does."""
    fork_disabled_nodes: int = 0
    """Members that say so."""
    stall: Failure | None = None
    """The worker to name for the last standstill of the round, where that ends nothing."""
    straggler: Straggler | None = None
    """Of the running round."""


# ---- termination message ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Termination:
    """What an agent writes to /dev/termination-log, outcome first. One with SUCCEEDED proves the job's success."""

    outcome: Outcome
    reason: str
    round: RoundId | None = None
    message: str = ""
    failure: Failure | None = None


# ---- the closed unions and their wire form -----------------------------------------------------------------------

NodeToCoordinator: TypeAlias = (
    Announce
    | Ready
    | WorkersStarted
    | WorkersFailed
    | WorkersStalled
    | WorkersSucceeded
    | WorkersStopped
    | Leaving
    | Close
    | StepReport
    | StepTimes
    | NewerStore
)
CoordinatorToNode: TypeAlias = StartRound | Standby | PlanEnd | EndRound | Closed | Finish
Message: TypeAlias = NodeToCoordinator | CoordinatorToNode | OperatorView | Report

_TYPES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (
        Announce, Ready, WorkersStarted, WorkersFailed, WorkersSucceeded, WorkersStopped, Leaving, Close, StepReport,
        NewerStore, WorkersStalled, StepTimes, StartRound, Standby, PlanEnd, EndRound, Closed, Finish, OperatorView,
        Report,
    )
}  # fmt: skip


def encode(message: Message) -> bytes:
    """One message as a JSON object with its `type` first."""
    tagged: dict[str, Any] = {"type": type(message).__name__}
    return codec.dumps(tagged | codec.dump(message))


def decode(data: bytes) -> Message:
    """Read what `encode` wrote; `codec.MessageError` for anything else."""
    raw = codec.loads(data)
    if not isinstance(raw, dict):
        raise codec.MessageError("want an object")
    name = raw.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        raise codec.MessageError(f"unknown message type {str(name)[:80]!r}")
    return codec.parse(_TYPES[name], raw)
