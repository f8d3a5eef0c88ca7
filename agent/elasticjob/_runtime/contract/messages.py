"""Messages on the control link, and the termination message of a pod.

Every message is a frozen dataclass. `encode` and `decode` convert it to a JSON object whose `type` is the class name.

    node ──► coordinator       Announce, Ready, WorkersStarted, WorkersFailed, WorkersSucceeded, WorkersStopped,
                               WorkersStalled, Leaving, StepReport, StepTimes, TrainingProgress,
                               StateReceived, Close, QueryClosed, NewerStore
    coordinator ──► node       StartRound, Standby, PlanEnd, EndRound, Closed, Finish, MachineEnd
    store ──► node             StandbyStore, StoreActive
    node ──► group rank 0      MemberLink, over a link of their own, which stays idle
    group rank 0 ──► node      CutOffNotice
    operator ──► coordinator   OperatorView
    coordinator ──► operator   Report

A round, from its start to its end, between the coordinator and one node:

    node                                    coordinator
    Announce, Ready         ──────────────►
                            ◄────────────── StartRound      (Standby: the node is not in the round)
    WorkersStarted          ──────────────►
                            ◄────────────── PlanEnd         (planned ends only; the node answers StepReport)
                            ◄────────────── EndRound
    WorkersStopped          ──────────────►
                            ◄────────────── StartRound, Standby or Finish

A node whose worker fails sends WorkersFailed; the coordinator then ends the round with EndRound on every member. When
every member has sent WorkersSucceeded, the coordinator sends Finish.

Points in time are Unix seconds of the sender's clock, durations are seconds. A `RoundId` is written `attempt.store.n`:
execution attempt (always 1 at present), incarnation of the store pod, number of the round.

A job keeps its version of agents and stores, so an operator works with stores of earlier and of later versions. A
receiver ignores what it does not know of a message (`codec`), and messages of types that it does not know.

No message is queued for a broken connection. After a reconnect the node's Announce carries its state, the node repeats
what the coordinator may have missed (`agent.machine.greeting`), and the coordinator sends the current StartRound,
PlanEnd or EndRound again. Receivers ignore repetitions. Every OperatorView and every Report is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeAlias, get_args

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.failures.failure_rules import FailureAction, FailureRule
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.text import printable

PROTOCOL = 4
"""Version of the messages. The two sides of a control link use the lower of their versions. A new type of message or a
new value of an enum raises it, with an entry in `NEW_MESSAGES` or `NEW_VALUES`; a new field with a default does not."""
OLDEST_PROTOCOL = 2
"""The lowest version that this one works with: that of elasticjob 0.1.0, which closes a link for a value or a type of
message that it does not know."""

ANY_INDEX = -1
"""`Announce.index` of a node that no operator has numbered, e.g. under a stock torchrun."""


class FailureClass(str, Enum):
    """Classes of failures of a worker, or of its whole node."""

    USER_ERROR = "UserError"
    """The training program failed: an exception, a non-zero exit code, a crash."""
    OOM_KILLED = "OOMKilled"
    """The kernel killed a process at the container's memory limit."""
    KILLED = "Killed"
    """A signal from outside ended the worker."""
    COLLECTIVE_FAILED = "CollectiveFailed"
    """A collective failed because a peer failed. It is the root cause only if no other failure is known."""
    HANG = "Hang"
    """The worker made no progress within the progress timeout."""
    NODE_LOST = "NodeLost"
    """The node, or the connection to it, was lost."""
    PREEMPTED = "Preempted"
    """Kubernetes ended the pod: preemption, eviction, drain, or shutdown of its node."""
    START_ERROR = "StartError"
    """The command could not be executed."""
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    """The node cannot train: a GPU, memory, disk or clock problem, or a worker that SIGKILL does not end."""


@dataclass(frozen=True)
class Failure:
    """One failure of a worker or of a node."""

    kind: FailureClass
    pod: str
    """Name of the pod."""
    time: float
    """When it happened; Unix seconds."""
    rank: int | None = None
    """Global rank of the worker; None if the whole node failed, or if no worker existed yet."""
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
    """DEVICE_UNHEALTHY only: a healthy machine may show the same. The first time, the job only moves away from it."""
    ended_ranks: tuple[int, ...] = ()
    """COLLECTIVE_FAILED only: global ranks of workers that had ended with success before. The coordinator adds
    them."""

    def __post_init__(self) -> None:
        # A worker wrote them. They get to terminals, and to the API server, which refuses what is no Unicode.
        object.__setattr__(self, "exception", printable(self.exception))
        object.__setattr__(self, "message", printable(self.message))


class Outcome(str, Enum):
    """How a job, or the part of one node in it, ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    LEFT = "Left"
    """The node left, for example because its pod was drained. The job goes on without it."""
    SUPERSEDED = "Superseded"
    """A newer pod has the node's index."""
    ERROR = "Error"
    """The agent could not do its work, e.g. it never reached the store."""


class MemberState(str, Enum):
    """State of one node's workers in a round."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Every worker of the node exited 0."""
    FAILED = "failed"
    """A worker failed; others of the node may still run."""
    STOPPED = "stopped"
    """No worker of the round is left on the node."""


# ---- node to coordinator ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewProcesses:
    """The processes that a node has to start for its next round, and what starts and rounds have taken there.

    Only scripts whose function can be called again (`@elasticjob.restartable`) have other processes, which wait.
    """

    count: int = 0
    """Workers of the node without a process that waits for the next round."""
    start_seconds: float | None = None
    """Seconds from the last start of a process in a round to its function, the longest of the node's processes started
    together; None if that is unknown."""
    form_seconds: float | None = None
    """Seconds from the call of the function to the end of `State.sync` in the node's last round that came so far: the
    ranks form their group, and wait for the slowest. None if that is unknown."""
    may_start_ahead: bool = True
    """False: a process that the node started ahead of a round ended before the function, and none has come to it."""
    keeps_newest_state: bool = False
    """The processes of this node that wait for the next round were brought to the newest state in the last one, and
    need no memory of another node. False for shards (`elasticjob.ShardedState`)."""


NO_NEW_PROCESSES = NewProcesses()
"""A node that has had no round, or one whose processes all wait for the next one."""


@dataclass(frozen=True)
class LastMembership:
    """The last round that a node was in. A coordinator that has just started may not know that round."""

    assignment: StartRound
    state: MemberState
    results_ended: bool = False
    """Whether its workers count no step of that round any more, and wait for `BreakRound`: as `NodeResultsEnded`."""


@dataclass(frozen=True)
class Announce:
    """First message of a node on every connection. It carries the node's whole state."""

    index: int
    """Index of the pod in the job. `ANY_INDEX`: the coordinator assigns the lowest free index."""
    incarnation: int
    """How many pods the index had before this one."""
    agent_id: str
    """Random id of the agent process. The same id on a new connection is the same agent, which reconnected."""
    pod: str
    address: str
    """IP address or host name at which other nodes reach this node."""
    store_port: int
    """Port on which the node's process-group store listens. A round with rank 0 on this node uses that store."""
    local_world_size: int
    """Workers of this node."""
    role: str = "default"
    """torch's role name of the workers."""
    ready: bool = False
    """As the message `Ready`: the node can start workers at once."""
    membership: LastMembership | None = None
    """None if the node has not been in a round."""
    fork_disabled_reason: str = ""
    """Why workers start by exec although preloading is configured; empty if they are forked or `preload` is empty."""
    store_vanished: bool = False
    """Only keep-alive detected that the node's last link was lost: the machine of that store is down or cut off."""
    restartable: bool = False
    """A worker of this node has called a function that the agent can have called again (`@elasticjob.restartable`).
    Only the node of group rank 0 reports it: all nodes run the same script."""
    hang_guard: str = ""
    """What ends a hang of this node's workers, for people, where the job has no hangPolicy and torch's own time-out is
    off (`@elasticjob.restartable`); empty if that is not so. Only the node of group rank 0 reports it."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """As in `WorkersStopped`; its count is 0 while workers run, or are started ahead of a round."""
    knows_machine_end: bool = False
    """The node has been sent a `MachineEnd` with a time, which may have been withdrawn while it had no link."""


@dataclass(frozen=True)
class Ready:
    """The node is healthy, its imports are done, and it can start workers at once. Sent again when a field changes, and
    when processes that were started ahead of a round wait at their function."""

    fork_disabled_reason: str = ""
    """As in `Announce`."""
    restartable: bool = False
    """As in `Announce`."""
    hang_guard: str = ""
    """As in `Announce`."""


@dataclass(frozen=True)
class WorkersStarted:
    """All workers of the node run."""

    round: RoundId


@dataclass(frozen=True)
class WorkersFailed:
    """A worker failed. Sent at the first failure; `WorkersStopped` follows when no local worker is left."""

    round: RoundId
    failure: Failure


@dataclass(frozen=True)
class WorkersStalled:
    """The workers hang and are left running (`StartRound.hang_ends_round` is false).

    Sent once per stall: again only if the workers hang after further progress.
    """

    round: RoundId
    failure: Failure


@dataclass(frozen=True)
class WorkersSucceeded:
    """Every local worker exited 0. The node waits for `Finish`; it may have to run again in another round."""

    round: RoundId


@dataclass(frozen=True)
class NodeResultsEnded:
    """No worker of the round counts a step any more on this node, and they wait for `BreakRound` to leave collectives.

    Sent only by nodes whose workers use devices that work behind the host (see `restart_messages.ResultsEnded`).
    """

    round: RoundId


@dataclass(frozen=True)
class WorkersStopped:
    """No worker of the round is left on this node."""

    round: RoundId
    store_port: int
    """Port of a fresh process-group store for the next round."""
    ended_ranks: tuple[int, ...] = ()
    """Global ranks of the node's workers that had succeeded before a stop."""
    has_state: bool = True
    """Whether the node may have a training state: in a process that has trained and stays, or in its memory."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What the node has to start for its next round."""


@dataclass(frozen=True)
class Leaving:
    """The node is drained, or cannot train.

    A member then waits for `EndRound` and stops its workers. Every leaving node ends with `Finish`.
    """

    reason: str
    failure: Failure | None = None
    """Why the node cannot train; the operator then replaces its pod on another machine. None if it is drained."""


@dataclass(frozen=True)
class Close:
    """Form no more rounds (torch's `set_closed`). Ignored if the job has an operator, which decides when it ends.

    Without an `Announce` before it, the sender is a visitor and no node: it gets the answer to `QueryClosed`.
    """

    reason: str


@dataclass(frozen=True)
class QueryClosed:
    """Asks whether the rendezvous is closed (torch's `is_closed`). The first message of a visitor.

    Answer: `Closed`; `Standby` while the rendezvous is open.
    """


@dataclass(frozen=True)
class StepReport:
    """Answer to `PlanEnd`.

    Unless `step` is None, the node holds its workers at their next report until `EndRound` names the last step, or
    until the hold expires.
    """

    round: RoundId
    step: int | None
    """The latest step that any worker of the node can reach before it is held; None if not all report their steps."""


@dataclass(frozen=True)
class StepTimes:
    """Average duration of a step in the last minute or so."""

    round: RoundId
    step_seconds: float
    """Seconds of a whole step."""
    own_seconds: tuple[float, ...]
    """By local rank: seconds of a step spent in the rank's own work, without waits for other ranks."""


@dataclass(frozen=True)
class Metric:
    """A value that the training script reports, written as a number."""

    name: str
    value: str


@dataclass(frozen=True)
class TrainingProgress:
    """What the script of rank 0 has reported by `elasticjob.progress`. Sent by the node of rank 0, if it changes."""

    round: RoundId
    step: int
    """The last step that is done."""
    total: int | None
    """The number of steps of the whole training; None if the script has not named it."""
    step_seconds: float | None
    """Average duration of a step in this round; None before the second step."""
    metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class StateReceived:
    """A rank without the training state has received it from another rank."""

    round: RoundId
    rank: int
    size: int
    """Bytes."""
    seconds: float
    interface: str = ""
    """Network interface that has received it, on this rank's machine; empty if unknown."""


@dataclass(frozen=True)
class NewerStore:
    """Sent instead of `Announce` to a store that is older than one the node has met. That store then closes itself."""

    incarnation: int
    """Highest incarnation of a store that the node has met."""


# ---- coordinator to node ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRound:
    """A node's assignment in a new round: start the workers."""

    round: RoundId
    group_rank: int
    """Rank of the node among the nodes of the round."""
    group_world_size: int
    """Nodes in the round."""
    rank: int
    """Global rank of the node's first worker; its other workers have the following ranks."""
    world_size: int
    """Workers in the round."""
    role_rank: int
    """Rank of the node's first worker within its role."""
    role_world_size: int
    """Workers of that role in the round."""
    master_addr: str
    """Address of the process-group store, on the node of group rank 0."""
    master_port: int
    restarts: int
    """Restarts counted against the budget so far: TORCHELASTIC_RESTART_COUNT."""
    max_restarts: int
    """The budget."""
    progress_timeout: float = 0.0
    """Seconds without a step, after the first, that make a hang; 0 disables the check."""
    hang_ends_round: bool = True
    """False: a hang is only reported (`WorkersStalled`), and the workers are left running."""
    state_known: bool = True
    """False: no node of the round has a training state, although there was a round before. What a script has read ahead
    of this round, such as a checkpoint, may be outdated."""
    member_addresses: tuple[str, ...] = ()
    """For group rank 0: `Announce.address` of each node of the round, each address once. Its store serves the workers
    there before their nodes have links to it. Empty for the other nodes."""


@dataclass(frozen=True)
class Standby:
    """The node is not in the current round: wait for `StartRound`."""

    reason: str
    redundant: bool = False
    """The round is full without this node (torch's redundancy list)."""
    provisional: StartRound | None = None
    """For a script whose function can be called again: the ranks that the workers of this node would have if it joined
    the present round as its last node, with `BEFORE_ROUNDS` and no address of a store. With these the node may run the
    script up to its function ahead of the next round, in the processes that it has to start; `Ready` follows."""


@dataclass(frozen=True)
class Closed:
    """No further round will form; a running round goes on. Nodes outside it get `Finish`."""

    reason: str


@dataclass(frozen=True)
class PlanEnd:
    """The round will end at a step that all ranks can reach: hold the workers, and answer `StepReport` at once."""

    round: RoundId
    reason: str


@dataclass(frozen=True)
class EndRound:
    """Stop the workers of the round, then answer `WorkersStopped`.

    Without `last_step`, the node stops them: SIGTERM, `grace_seconds`, SIGKILL. With `last_step`, the workers stop by
    themselves after that step within `grace_seconds`; a second `EndRound`, without it, follows for workers that do not.

    The node keeps the round's process-group store up until `Finish` or the next `StartRound`.
    """

    round: RoundId
    grace_seconds: float
    reason: str
    planned: bool = False
    """The end was planned: a scale-up, a scale-down or a drain, not a failure."""
    last_step: int | None = None
    dump_stacks: bool = False
    """A worker hangs: dump and report the stacks of this node's workers before stopping them."""


@dataclass(frozen=True)
class BreakRound:
    """No node of the round counts a step any more: its collectives may be broken. Answers `NodeResultsEnded`."""

    round: RoundId
    discard: bool = False
    """Other nodes have broken theirs before: the state of this node may have a part of a broken result."""


@dataclass(frozen=True)
class Finish:
    """Last message to this node: write the termination message and exit."""

    outcome: Outcome
    reason: str
    """CamelCase, for programs."""
    message: str = ""
    """Details, for people."""


@dataclass(frozen=True)
class MachineEnd:
    """When the node's machine ends, as it is announced. Sent when that changes, and after an `Announce` of a node whose
    end is known or has been withdrawn."""

    seconds: float | None
    """Seconds from now, 0 or more; None: the end is announced no longer."""


# ---- about stores ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StandbyStore:
    """The standby store, to which the nodes go when they lose the present one.

    The operator sends it to the store, which sends it to its nodes: after each `Announce`, and when it changes.
    """

    incarnation: int
    host: str
    """Address of its pod; empty: there is no standby store."""
    port: int


NO_STANDBY_STORE = StandbyStore(-1, "", 0)


@dataclass(frozen=True)
class StoreActive:
    """This store, which was passive when the node connected, is the job's store from now on."""


# ---- nodes of a round, on the links to the round's store ---------------------------------------------------------


@dataclass(frozen=True)
class MemberLink:
    """First message on a node's link to the store of its round. Group rank 0 knows by it which nodes it reaches."""

    round: RoundId
    group_rank: int
    """Group rank of the node."""


@dataclass(frozen=True)
class CutOffNotice:
    """Group rank 0 has frozen its workers: it is cut off, and closes this link."""


# ---- operator and coordinator ----------------------------------------------------------------------------------


class HangAction(str, Enum):
    """What the coordinator does when training hangs (`spec.hangPolicy.action`)."""

    RESTART_GROUP = "RestartGroup"
    """End the round and start the next one; the restart counts against the budget."""
    FAIL_JOB = "FailJob"
    EVENT = "Event"
    """Report the hang and leave the workers running."""


class RestartStrategy(str, Enum):
    """What follows a round that a failed worker or a lost node ended (`spec.restartStrategy`)."""

    IN_PLACE = "InPlace"
    """The agents of its nodes start workers again."""
    RECREATE = "Recreate"
    """Its nodes leave; the operator replaces their pods."""


class SuccessPolicy(str, Enum):
    """When the job has succeeded (`spec.successPolicy`)."""

    ALL = "All"
    """Once the workers of every member of a round have succeeded."""
    ANY = "Any"
    """Once all workers of one member have succeeded; the coordinator then stops the others."""


def allowed_size(nodes: int, low: int, increment: int) -> int:
    """Return the largest size of at most `nodes` nodes that is `low` plus a multiple of `increment`.

    `nodes` is at least `low`.
    """
    return nodes - (nodes - low) % increment


@dataclass(frozen=True)
class RoundSettings:
    """The job's settings for rounds: first those of the store's environment, then those of each `OperatorView`."""

    min_nodes: int
    max_nodes: int
    target: int
    """Nodes that the round should have now (`spec.replicas`), from `min_nodes` to `max_nodes`."""
    spares: int = 0
    """Nodes beyond the target. They are standbys and replace lost nodes."""
    max_restarts: int = 3
    """Restarts before the job fails."""
    join_timeout: float = 600.0
    """Seconds that a node waits for its first round before it gives up."""
    last_call_timeout: float = 30.0
    """Seconds that the first round waits for more nodes once `min_nodes` have announced themselves.

    The last call applies only while no operator has named the expected pods.
    """
    stop_grace: float = 1.0
    """Seconds from SIGTERM to SIGKILL after a failure; workers never have less."""
    graceful_shutdown: float = 120.0
    """Seconds that a planned end may take, from its announcement to the last worker's exit, before workers are killed.
    """
    keep_alive_interval: float = 1.0
    """Seconds between the kernel's keep-alive probes on a control link."""
    keep_alive_max_attempts: int = 3
    """Unanswered probes after which a link is lost."""
    scale_up_stabilization: float = 30.0
    """Seconds that a running round waits for further ready nodes before it ends to take in those that are ready."""
    progress_timeout: float = 0.0
    """Seconds without a step that make a hang; 0 disables the check. A change applies from the next round."""
    hang_action: HangAction = HangAction.RESTART_GROUP
    """A change to or from `EVENT` applies from the next round."""
    increment: int = 1
    """A round has `min_nodes` plus a multiple of this."""
    restart_window: float = 0.0
    """Seconds from the first restart of a window to its end: restarts before it do not count. 0: all restarts count."""
    backoff: float = 0.0
    """Seconds that the round after the first restart waits; they double with each further restart that counts. 0: no
    round waits."""
    max_backoff: float = 300.0
    """Seconds that a round waits at most."""
    failure_rules: tuple[FailureRule, ...] = ()
    """The first rule that matches the root cause of a round's end decides what follows."""
    restart_strategy: RestartStrategy = RestartStrategy.IN_PLACE
    success_policy: SuccessPolicy = SuccessPolicy.ALL

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
        if self.increment < 1:
            raise ValueError(f"increment ({self.increment}) must be at least 1")

    def round_size(self, nodes: int) -> int:
        """Return the size of a round for which `nodes` nodes, `min_nodes` or more, are available."""
        return allowed_size(min(nodes, self.target), self.min_nodes, self.increment)

    @property
    def desired_pods(self) -> int:
        """Number of indices that have a pod. Any of their nodes may be a member or a standby."""
        return self.target + self.spares


class PodState(str, Enum):
    """State of a worker pod in Kubernetes, as far as rounds depend on it."""

    STARTING = "starting"
    """Scheduled, not running yet."""
    RUNNING = "running"
    DRAINING = "draining"
    """Being deleted or evicted: no round may include it."""
    UNSCHEDULABLE = "unschedulable"
    """Pending without a machine, or its image cannot be pulled: no round waits for it."""
    LOST = "lost"
    """Kubernetes reports it running, but its kubelet is silent: a recovering store waits for it only briefly."""


@dataclass(frozen=True)
class ExpectedPod:
    """The live pod of an index. An index that is not listed has no pod, and no round waits for it."""

    index: int
    incarnation: int
    """Older incarnations of the index are ignored, even if still running."""
    pod: str
    state: PodState = PodState.RUNNING
    """RUNNING also where this store does not know the state that the operator has sent."""
    topology: tuple[str, ...] = ()
    """Where its machine is, from the widest place to the narrowest, such as zone and rack; empty if that is unknown."""


@dataclass(frozen=True)
class EndingPod:
    """A pod on a machine of which it is known when it ends."""

    pod: str
    time: float
    """When the machine ends, Unix seconds."""


@dataclass(frozen=True)
class OperatorView:
    """All that the operator knows; each view replaces the previous one.

    The coordinator drops a view whose (lease, sequence) is not newer: two operators may be connected at once.
    """

    lease: int
    """Generation of the operator's leader-election lease, or more than `Report.view_lease` where that is not newer."""
    sequence: int
    """Counter of the views of one lease holder."""
    settings: RoundSettings
    charged: int
    """Restarts counted against the budget, as persisted in the job's status."""
    charged_round: RoundId | None
    """Last ended round that the status accounts for; the coordinator drops its records up to this round."""
    pods: tuple[ExpectedPod, ...] = ()
    confirmed_request: float = 0.0
    """Copy of `Report.confirmation_request`: the operator confirms that this is the job's only store. 0: nothing is
    confirmed."""
    confirmed_half: bool = False
    """The confirmation holds only while no more than half of the last round's nodes are missing."""
    charged_rounds: tuple[RoundId, ...] = ()
    """Rounds after `charged_round` that `charged` includes already, because a pod failed as their member."""
    finish: Finish | None = None
    """How the job ended, by its status; None while it runs. A store that started after the end cannot know."""
    serving: int = -1
    """Incarnation of the store that status names. A standby store that it names becomes active."""
    standby_store: StandbyStore | None = None
    """The standby store, once it can take over; None: there is none that the nodes may use."""
    retired: bool = False
    """To a passive standby store: it must never become active."""
    charged_since: float = 0.0
    """When the first failure of the window happened to which `charged` belongs, Unix seconds; 0 without a window."""
    newest_round: RoundId | None = None
    """The newest round that the operator knows of, if all its workers had started. A standby store takes over for this
    round or a newer one only, and no store takes an older one for the last round."""
    beside_store: tuple[str, ...] = ()
    """Names of the pods on the node of the store that status names: they are lost together with that node."""
    sent_at: float = 0.0
    """When the operator sends this view, Unix seconds of the clock by which it knows `ending_pods`."""
    ending_pods: tuple[EndingPod, ...] | None = None
    """Worker pods on machines that are about to end, where the time is known; None while the operator sees no Nodes:
    what it has sent before holds."""


class RoundPhase(str, Enum):
    """Phase of a coordinator."""

    STANDBY = "Standby"
    """The store is a passive standby store: it collects announcements and decides nothing."""
    RECOVERING = "Recovering"
    """The store has replaced another one and collects the nodes' announcements before it decides anything."""
    GATHERING = "Gathering"
    """No round runs; the coordinator waits for nodes."""
    RUNNING = "Running"
    ENDING = "Ending"
    """The members of a round stop their workers."""
    FINISHED = "Finished"


class EndReason(str, Enum):
    """Why a round ended. Those that lead to a restart are reasons of the `Restarting` condition too."""

    WORKER_FAILED = "WorkerFailed"
    """A worker failed or hung by itself. The only reason for which a restart is charged."""
    AGENT_LOST = "AgentLost"
    """A node's connection was lost, or the node did not stop its workers in time, or the last process with the training
    state ended as the round began."""
    NODE_LEFT = "NodeLeft"
    """A node was drained, its pod was deleted, or the node was unhealthy, and it left."""
    SCALING_UP = "ScalingUp"
    """Ready nodes join."""
    SCALING_DOWN = "ScalingDown"
    """The job needs fewer nodes, or none of the indices that left."""
    SUCCEEDED = "Succeeded"


@dataclass(frozen=True)
class RoundEnded:
    """One ended round. Reports repeat it until `OperatorView.charged_round` has reached it."""

    round: RoundId
    reason: EndReason
    message: str
    charged: bool
    """The end counts against the restart budget."""
    time: float
    """When it ended; Unix seconds of the coordinator."""
    world_size: int
    failure: Failure | None = None
    """The root cause; None if no failure ended the round."""
    lost_pods: tuple[str, ...] = ()
    """Names of pods that were lost or left."""
    rule: str = ""
    """Name of the failure rule that matched the root cause; empty if none did."""
    action: FailureAction | None = None
    """That rule's action."""


@dataclass(frozen=True)
class RecoverySeconds:
    """Seconds of each phase from a fault until the workers of the next round have started."""

    pods: tuple[str, ...]
    """Names of the pods that failed, were lost or left."""
    detect: float
    """From the failure until the coordinator ended the round. Compares the clocks of two hosts."""
    stop: float
    """Until no worker of the old round was left."""
    rendezvous: float
    """Until the next round was formed."""
    start: float
    """Until all workers of the next round had started."""


@dataclass(frozen=True)
class LostTime:
    """What a fault, or several in a row, has cost."""

    round: RoundId
    """The round that made the first new step after it."""
    seconds: float
    """From the fault to that step; to the start of the round's workers, if the script reports no steps."""


@dataclass(frozen=True)
class Straggler:
    """A rank for which all others wait in every step. Figures are those of the moment it was named."""

    rank: int
    pod: str
    own_seconds: float
    """Seconds of a step spent in this rank's own work."""
    median_seconds: float
    """Median of the same figure over the other ranks."""
    time: float
    """When it was named; Unix seconds."""


@dataclass(frozen=True)
class StateTransfer:
    """The slowest transfer of a training state in the last round that had any."""

    received: StateReceived
    pod: str
    """Pod of the rank that received it."""
    time: float
    """When the coordinator learned of it; Unix seconds."""


@dataclass(frozen=True)
class NodeReport:
    """One connected node."""

    index: int
    incarnation: int
    pod: str
    ready: bool
    """The node can start workers at once."""
    member: bool
    """The node is in the current round."""


@dataclass(frozen=True)
class Report:
    """The coordinator's whole view. It goes to each operator when it connects, and after every change."""

    incarnation: int
    """Incarnation of the store."""
    phase: RoundPhase
    reason: str
    """Explanation of the phase, for people."""
    round: RoundId | None
    """The round that runs or ends; None if there is none."""
    rounds: int
    """Number of rounds that this store process has formed or restored."""
    world_size: int
    """Workers in the round; 0 without a round."""
    formed_at: float
    """When all workers of the round had started; Unix seconds, 0 before."""
    nodes: tuple[NodeReport, ...] = ()
    ended_rounds: tuple[RoundEnded, ...] = ()
    outcome: Outcome | None = None
    """SUCCEEDED or FAILED once the job has ended; None before."""
    failure: Failure | None = None
    """The root cause if the outcome is FAILED."""
    lost_pods: tuple[str, ...] = ()
    """Names of pods that are disconnected, or do not stop an old round, although the operator lists them as running."""
    unhealthy: tuple[Failure, ...] = ()
    """One failure for each listed pod whose node cannot train and needs a replacement on another machine."""
    active: int = 0
    """Nodes in the round."""
    recovery: RecoverySeconds | None = None
    """Recovery from the last fault, once it is complete."""
    confirmation_request: float = 0.0
    """When this coordinator asked whether it is the job's only store; Unix seconds, 0 if no request is open."""
    half_missing_round: RoundId | None = None
    """The last round, if a confirmation request is open and **exactly** half of that round's members are missing. None
    also where more than half are."""
    pods_that_may_write: tuple[str, ...] | None = ()
    """While a request is open: pods that are missing here and may go on with an earlier round; None if the coordinator
    does not know all of them."""
    fork_disabled_reason: str = ""
    """Why workers start by exec on the first member, by group rank, that reports a reason; empty if none does."""
    fork_disabled_nodes: int = 0
    """Members that report such a reason."""
    hang_guard: str = ""
    """As in `Announce`, of the first member by group rank that reports one."""
    stall: Failure | None = None
    """The worker to blame for the last stall of the round, if hangs do not end rounds."""
    straggler: Straggler | None = None
    """The straggler of the current round."""
    progress: TrainingProgress | None = None
    """The last one of any round; None if the script reports none. A change of it alone is reported rarely."""
    state_transfer: StateTransfer | None = None
    """None if no rank has received a state since this store began."""
    lost: tuple[LostTime, ...] = ()
    """The last times that faults have cost, the oldest first; those of earlier stores are left out."""
    retired: bool = False
    """This standby store has never been active, and never will be."""
    view_lease: int = -1
    """`lease` of the last `OperatorView` that the coordinator accepted; -1 before the first."""


# ---- termination message ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Termination:
    """An agent's termination message, in /dev/termination-log. `outcome` comes first, so truncation does not lose it.

    A single message with the outcome SUCCEEDED proves that the job succeeded.
    """

    outcome: Outcome
    reason: str
    round: RoundId | None = None
    """The node's last round; None if it was in none."""
    message: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class InRound:
    """What stands in /dev/termination-log from the start of a node's workers on.

    The kubelet finds it there if the agent is killed with its workers, for example at the container's memory limit.
    """

    round: RoundId


# ---- the closed unions and their wire form -----------------------------------------------------------------------

NodeToCoordinator: TypeAlias = (
    Announce
    | Ready
    | WorkersStarted
    | WorkersFailed
    | WorkersStalled
    | WorkersSucceeded
    | NodeResultsEnded
    | WorkersStopped
    | Leaving
    | Close
    | QueryClosed
    | StepReport
    | StepTimes
    | TrainingProgress
    | StateReceived
    | NewerStore
)
CoordinatorToNode: TypeAlias = StartRound | Standby | PlanEnd | EndRound | BreakRound | Closed | Finish | MachineEnd
StoreToNode: TypeAlias = StandbyStore | StoreActive
"""Messages about stores, for the node's side of the control link."""
Message: TypeAlias = (
    NodeToCoordinator | CoordinatorToNode | StoreToNode | MemberLink | CutOffNotice | OperatorView | Report
)

_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


NEW_MESSAGES: Mapping[type[Message], int] = {
    TrainingProgress: 3,
    MachineEnd: 3,
    StateReceived: 3,
    NodeResultsEnded: 4,
    BreakRound: 4,
}
"""The first version that knows a type of message, for those that came after `OLDEST_PROTOCOL`."""


@dataclass(frozen=True)
class NewValue:
    """A member of an enum that came after `OLDEST_PROTOCOL`."""

    member: Enum
    since: int
    """The first version that knows it."""
    instead: Enum
    """What peers of earlier versions get."""


NEW_VALUES: tuple[NewValue, ...] = ()


class UnknownMessageError(codec.MessageError):
    """The type of a message is unknown: a newer peer may have sent it."""


def is_known(message: Message, protocol: int) -> bool:
    """Return whether version `protocol` knows messages of this type."""
    return NEW_MESSAGES.get(type(message), OLDEST_PROTOCOL) <= protocol


def encode(message: Message, protocol: int = PROTOCOL) -> bytes:
    """Return a message as a JSON object, its `type` first, with values that version `protocol` knows."""
    newer = [value for value in NEW_VALUES if value.since > protocol]
    tagged: dict[str, Any] = {"type": type(message).__name__}
    return codec.dumps(tagged | codec.dump(_with_older_values(message, newer) if newer else message))


def _with_older_values(value: Any, newer: Sequence[NewValue]) -> Any:
    """Return the value with the members of `newer` replaced."""
    if isinstance(value, Enum):
        # Members of different enums may be equal.
        return next((new.instead for new in newer if new.member is value), value)
    if type(value) is tuple:
        return tuple(_with_older_values(item, newer) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: _with_older_values(getattr(value, f.name), newer) for f in fields(value)})


def decode(data: bytes) -> Message:
    """Return the message that `encode` wrote. MessageError: `data` is something else."""
    raw = codec.loads(data)
    if not isinstance(raw, dict):
        raise codec.MessageError("want an object")
    name = raw.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        raise UnknownMessageError(f"unknown message type {str(name)[:80]!r}")
    return codec.parse(_TYPES[name], raw)
