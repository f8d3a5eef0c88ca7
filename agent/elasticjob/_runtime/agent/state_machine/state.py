"""The agent's state. `decide` returns the next state for each event.

An `AgentState` has four parts that change on their own: the activity (what the workers do), the last round with its
planned end, the agent's departure, and what is ready for the next round. Each part has a type of its own, so that
combinations without a meaning cannot be built: only a stop has a grace period or a message that waits for its end,
only a planned end has a last step, and every new round begins with a new `AgentRound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elasticjob._runtime.contract.messages import (
    NO_NEW_PROCESSES,
    Announce,
    Failure,
    Finish,
    MemberState,
    NewProcesses,
    StartRound,
)
from elasticjob._runtime.contract.names import RoundId

# ---- what the workers do ---------------------------------------------------------------------------------------------


class AgentPhase(str, Enum):
    """The name of an activity in metrics and in the health endpoint; `decide` has the diagram."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class Idle:
    """No worker of a round runs."""

    parked: bool = False
    """Whether processes wait for the next round."""


@dataclass(frozen=True)
class Starting:
    """A round has formed, and its workers are not all started yet."""


@dataclass(frozen=True)
class Running:
    """All workers of the round have been started."""


@dataclass(frozen=True)
class Succeeded:
    """All workers of the round have exited 0; other agents may still run theirs."""


@dataclass(frozen=True)
class Stopping:
    """Workers, or processes that waited for a round, are being stopped."""

    graceful: bool = False
    """Whether the stop belongs to a planned end, which may take long."""
    results_ended: bool = False
    """Whether no worker counts a step any more, and they wait until no worker of another agent counts one either."""
    then: StartRound | Finish | None = None
    """The message to act on once no worker is left."""


@dataclass(frozen=True)
class Finished:
    """The agent exits. Every event is ignored."""


Activity: TypeAlias = Idle | Starting | Running | Succeeded | Stopping | Finished

_PHASES: dict[type[Activity], AgentPhase] = {
    Idle: AgentPhase.IDLE,
    Starting: AgentPhase.STARTING,
    Running: AgentPhase.RUNNING,
    Succeeded: AgentPhase.SUCCEEDED,
    Stopping: AgentPhase.STOPPING,
    Finished: AgentPhase.FINISHED,
}


# ---- the last round --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReported:
    """This agent has sent its `StepReport`. The coordinator has not named the last step yet."""


@dataclass(frozen=True)
class LastStep:
    """The coordinator has named the step at which the workers stop by themselves."""

    step: int
    seconds: float
    """Seconds that the workers have for it, from the message that named it."""


@dataclass(frozen=True)
class AgentRound:
    """The last round that this agent was a member of, whether it runs or has ended."""

    start: StartRound
    """The assignment of this agent."""
    running_ranks: frozenset[int]
    """Local ranks of the running workers."""
    member: MemberState = MemberState.STARTING
    """The state of this pod's workers, as `greeting` announces it."""
    launched: bool = False
    """Whether `LaunchWorkers` was decided; it waits until the launcher is ready."""
    planned_end: StepReported | LastStep | None = None
    """How far the planned end of the round has come in this pod; None: none has begun."""
    stopped_as_planned: bool = False
    """Whether a worker has stopped at the last step."""
    ended_stage: int = 0
    """The last launcher of the command whose ranks have all ended in this round; 0: none (`round.stages`)."""
    frozen: bool = False
    """Whether the workers are stopped with SIGSTOP, until the coordinator reports what became of the round."""
    failure: Failure | None = None
    """The first failure of a worker in this pod."""
    stall: Failure | None = None
    """The last hang in this pod that did not end the round."""

    @property
    def id(self) -> RoundId:
        """The round's id."""
        return self.start.round

    @property
    def last_step(self) -> LastStep | None:
        """The last step; None until the coordinator has named it."""
        return self.planned_end if isinstance(self.planned_end, LastStep) else None


# ---- the agent leaves ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leave:
    """This agent leaves the job: because of a signal, or because a health check has failed."""

    signal: str = ""
    """Name of the signal that the agent has received. The next signal kills the workers. Empty: none yet."""
    unhealthy: Failure | None = None
    """The failed health check; None if there was none before the signal."""

    def __post_init__(self) -> None:
        if not self.signal and self.unhealthy is None:
            raise ValueError("a node leaves because of a signal or of a failed health check: one of them is needed")

    @property
    def reason(self) -> str:
        """The reason as `Leaving` reports it: the failed health check, or the signal's name."""
        if self.unhealthy is not None:
            return f"{self.unhealthy.kind.value}: {self.unhealthy.message}"
        return self.signal


# ---- the whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentState:
    """The state of one agent."""

    announcement: Announce
    """The announcement without `ready` and `membership`; its store port is the port for the next round."""
    stop_grace: float
    """Seconds from SIGTERM to SIGKILL after a failure; workers never have less."""
    graceful_shutdown: float = 0.0
    """Seconds from SIGTERM to SIGKILL if this agent leaves and the coordinator does not answer."""
    processes: int | None = None
    """How many processes this agent starts in a round; None: its local world size."""

    activity: Activity = Idle()
    last_round: AgentRound | None = None
    """None before the first round."""
    leave: Leave | None = None
    """None while this agent stays."""
    end_announced: bool = False
    """Whether the coordinator has sent `PlanEnd`, `EndRound` or `Finish` since the last round began. An agent that
    leaves then leaves the time to the coordinator. Once an agent leaves, the next round does not reset it."""

    launcher_ready: bool = False
    """Whether the imports, if there are any, and the health check are done, so that workers can start."""
    provisional: StartRound | None = None
    """The assignment with which workers may be prestarted; None if they may not, or have been prestarted already."""
    prestarting: bool = False
    """Whether prestarted workers still run their script up to its function."""
    has_state: bool = True
    """Whether this agent may have a training state, as `WorkersStopped` reports."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What has to be started for the next round, as `WorkersStopped` reports; the count is 0 once that has begun."""

    def __post_init__(self) -> None:
        if self.last_round is None and isinstance(self.activity, (Starting, Running, Succeeded)):
            raise ValueError(f"an agent without a round cannot be {self.phase.value}")

    @property
    def phase(self) -> AgentPhase:
        """The name of the activity."""
        return _PHASES[type(self.activity)]

    @property
    def ready(self) -> bool:
        """Whether the agent can start workers at once."""
        return self.launcher_ready and not self.prestarting

    @property
    def round(self) -> RoundId | None:
        """The id of the last round; None before the first one."""
        return self.last_round.id if self.last_round else None

    @property
    def rank_0_round(self) -> RoundId | None:
        """The present round if rank 0 is in this pod."""
        start = self.assignment
        return start.round if start is not None and start.rank == 0 else None

    @property
    def is_first_member(self) -> bool:
        """Whether this pod has group rank 0 in the last round."""
        return self.assignment is not None and self.assignment.group_rank == 0

    @property
    def assignment(self) -> StartRound | None:
        """This agent's assignment in the last round; None before the first one."""
        return self.last_round.start if self.last_round else None

    @property
    def member(self) -> MemberState:
        """The state of this pod's workers in the last round."""
        return self.last_round.member if self.last_round else MemberState.STOPPED

    @property
    def failure(self) -> Failure | None:
        """The first failure of the last round in this pod."""
        return self.last_round.failure if self.last_round else None

    @property
    def launched(self) -> bool:
        """Whether workers of the last round were started, or are being started."""
        return self.last_round is not None and self.last_round.launched

    @property
    def frozen(self) -> bool:
        """Whether the workers of the last round are stopped with SIGSTOP."""
        return self.last_round is not None and self.last_round.frozen

    @property
    def planned_end(self) -> StepReported | LastStep | None:
        """How far the planned end of the last round has come; None: none has begun."""
        return self.last_round.planned_end if self.last_round else None

    @property
    def waits_for_stage(self) -> bool:
        """Whether all ranks of a launcher have ended here, and the coordinator has not finished its stage yet."""
        return self.last_round is not None and self.last_round.ended_stage > self.announcement.finished_stages

    @property
    def stopping(self) -> Stopping | None:
        """The stop in progress; None without one."""
        return self.activity if isinstance(self.activity, Stopping) else None

    @property
    def leaving(self) -> str:
        """Why this agent leaves; empty while it stays."""
        return self.leave.reason if self.leave else ""
