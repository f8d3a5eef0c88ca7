"""What the agents send to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elasticjob._runtime.contract.messages.failures import Failure
from elasticjob._runtime.contract.messages.to_agents import StartRound
from elasticjob._runtime.contract.names import RoundId

ANY_INDEX = -1
"""`Announce.index` of an agent that no operator has numbered, e.g. under a stock torchrun."""


class MemberState(str, Enum):
    """State of one agent's workers in a round."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Every worker of the agent exited 0."""
    FAILED = "failed"
    """A worker failed; others of the agent may still run."""
    STOPPED = "stopped"
    """No worker of the round is left in the agent's pod."""


@dataclass(frozen=True)
class NewProcesses:
    """The processes that an agent has to start for its next round, and how long its starts and rounds have taken.

    Only scripts whose function can be called again (`@elasticjob.restartable`) have other processes, which wait.
    """

    count: int = 0
    """Workers of the agent without a process that waits for the next round."""
    start_seconds: float | None = None
    """Seconds from the last start of a process in a round to its function, the longest of the agent's processes started
    together; None if that is unknown."""
    form_seconds: float | None = None
    """Seconds from the call of the function to the end of `State.sync` in the agent's last round that got there: the
    ranks form their group, and wait for the slowest. None if that is unknown."""
    may_start_ahead: bool = True
    """False: a prestarted process of the agent ended before it reached the function, and none has reached it."""
    keeps_newest_state: bool = False
    """The processes of this agent that wait for the next round were brought to the newest state in the last one. They
    need no memory of another worker pod. False for shards (`elasticjob.ShardedState`)."""


NO_NEW_PROCESSES = NewProcesses()
"""An agent that has had no round, or one whose processes all wait for the next one."""


@dataclass(frozen=True)
class LastMembership:
    """The last round that an agent was in. A coordinator that has just started may not know that round."""

    assignment: StartRound
    state: MemberState
    results_ended: bool = False
    """Its workers count no more steps of that round, and wait for `BreakRound`, as after `NodeResultsEnded`."""
    ended_stage: int = 0
    """The last stage that has ended there, as in `StageEnded`; 0: none has."""


@dataclass(frozen=True)
class Announce:
    """First message of an agent on every connection. It carries the agent's whole state."""

    index: int
    """Index of the pod in the job. `ANY_INDEX`: the coordinator assigns the lowest free index."""
    incarnation: int
    """How many pods the index had before this one."""
    agent_id: str
    """Random id of the agent process. The same id on a new connection is the same agent, which reconnected."""
    pod: str
    address: str
    """IP address or host name at which other worker pods reach this one."""
    store_port: int
    """Port on which the agent's process-group store listens. A round whose rank 0 this agent starts uses that store."""
    local_world_size: int
    """Number of workers that this agent starts."""
    role: str = "default"
    """torch's role name of the workers."""
    ready: bool = False
    """As the message `Ready`: the agent can start workers at once."""
    membership: LastMembership | None = None
    """None if the agent has not been in a round."""
    fork_disabled_reason: str = ""
    """Why workers start by exec although preloading is configured; empty if they are forked or `preload` is empty."""
    store_vanished: bool = False
    """Only keep-alive detected that the agent's last link was lost: the Node of that store is down or cut off."""
    restartable: bool = False
    """A worker of this agent has called a function that the agent can have called again (`@elasticjob.restartable`).
    Only the agent of group rank 0 reports it: all agents run the same script."""
    hang_guard: str = ""
    """What ends a hang of this agent's workers, for people, where the job has no hangPolicy and torch's own time-out is
    off (`@elasticjob.restartable`); empty if that is not so. Only the agent of group rank 0 reports it."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """As in `WorkersStopped`; its count is 0 while workers run, or are prestarted."""
    knows_machine_end: bool = False
    """The agent has been sent a `MachineEnd` with a time, which may have been withdrawn while it had no link."""
    finished_stages: int = 0
    """The most finished stages that a coordinator has named to the agent (`StartRound`, `StageFinished`)."""
    launchers: tuple[str, ...] = ()
    """`StageBegan.launcher` of each stage that the agent knows of."""


@dataclass(frozen=True)
class Ready:
    """The agent is healthy, its imports are done, and it can start workers at once. Sent again when a field changes,
    and when prestarted processes wait at their function."""

    fork_disabled_reason: str = ""
    """As in `Announce`."""
    restartable: bool = False
    """As in `Announce`."""
    hang_guard: str = ""
    """As in `Announce`."""


@dataclass(frozen=True)
class WorkersStarted:
    """All workers of the agent run."""

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
    """Every local worker exited 0. The agent waits for `Finish`; it may have to run again in another round."""

    round: RoundId


@dataclass(frozen=True)
class StageBegan:
    """The command of the pod has reached a launcher, whose ranks start now. Not sent again in later rounds."""

    round: RoundId
    stage: int
    """The number of the launcher, from 1."""
    launcher: str
    """What its ranks run: the script or module, and a digest of all words of the line, which may differ in each pod."""


@dataclass(frozen=True)
class StageEnded:
    """All ranks of a launcher in the pod's command have ended: with success, or by a signal of the command's own.

    The launcher waits for `StageFinished`, because the ranks run again if the round ends before.
    """

    round: RoundId
    stage: int
    """The number of the launcher, from 1."""


@dataclass(frozen=True)
class NodeResultsEnded:
    """The agent's workers count no more steps of the round, and wait for `BreakRound` to leave their collectives.

    Sent only by agents whose workers use devices that work asynchronously to the host (see
    `restart_messages.ResultsEnded`).
    """

    round: RoundId


@dataclass(frozen=True)
class WorkersStopped:
    """No worker of the round is left in the agent's pod."""

    round: RoundId
    store_port: int
    """Port of a fresh process-group store for the next round."""
    ended_ranks: tuple[int, ...] = ()
    """Global ranks of the agent's workers that had succeeded before a stop."""
    has_state: bool = True
    """Whether the worker pod may have a training state: in a process that has trained and stays, or in its memory."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What the agent has to start for its next round."""


@dataclass(frozen=True)
class Leaving:
    """The agent is drained, or cannot train.

    A member then waits for `EndRound` and stops its workers. Every leaving agent ends with `Finish`.
    """

    reason: str
    failure: Failure | None = None
    """Why the agent cannot train; the operator then replaces its pod on another Node. None if it is drained."""


@dataclass(frozen=True)
class Close:
    """Form no more rounds (torch's `set_closed`). Ignored if the job has an operator, which decides when it ends.

    Without an `Announce` before it, the sender is a visitor, not an agent: it gets the answer to `QueryClosed`.
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

    Unless `step` is None, the agent holds its workers at their next report until `EndRound` names the last step, or
    until the hold expires.
    """

    round: RoundId
    step: int | None
    """The latest step that any worker of the agent can reach before it is held; None if not all report their steps."""


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
    """What the script of rank 0 has reported by `elasticjob.progress`. Sent by the agent of rank 0, if it changes.

    Or what the output of workers has shown (`spec.logRules`), sent by the agents of these workers.
    """

    round: RoundId
    step: int
    """The last step that is done."""
    total: int | None
    """The number of steps of the whole training; None if the script has not named it."""
    step_seconds: float | None
    """Average duration of a step in this round; None before the second step."""
    metrics: tuple[Metric, ...] = ()
    from_log: bool = False
    """Whether the output has shown it. What a script reports comes before it."""


@dataclass(frozen=True)
class StateReceived:
    """A rank without the training state has received it from another rank."""

    round: RoundId
    rank: int
    size: int
    """Bytes."""
    seconds: float
    interface: str = ""
    """Network interface of the rank's pod that has received it; empty if unknown."""


@dataclass(frozen=True)
class NewerStore:
    """The agent has connected to a newer store. The older one, which gets this instead of `Announce`, closes itself."""

    incarnation: int
    """Highest incarnation of a store to which the agent has connected."""


AgentToCoordinator: TypeAlias = (
    Announce
    | Ready
    | WorkersStarted
    | WorkersFailed
    | WorkersStalled
    | WorkersSucceeded
    | StageBegan
    | StageEnded
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
