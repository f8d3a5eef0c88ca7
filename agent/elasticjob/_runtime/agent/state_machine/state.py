"""The agent's state. `decide` returns the next state for each event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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


class AgentPhase(str, Enum):
    """The phase of an agent; `decide` has the diagram."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class AgentState:
    """The state of one agent. `assignment` is its last round, running or ended, `member` its workers' state there."""

    announcement: Announce
    """The announcement without `ready` and `membership`; its store port is the port for the next round."""
    stop_grace: float
    """Seconds from SIGTERM to SIGKILL after a failure; workers never have less."""
    graceful_shutdown: float = 0.0
    """Seconds from SIGTERM to SIGKILL if this node leaves and the coordinator does not answer."""
    phase: AgentPhase = AgentPhase.IDLE
    processes: int | None = None
    """How many processes this agent starts in a round; None: its local world size."""
    launcher_ready: bool = False
    """Whether the imports, if there are any, and the health check are done, so that workers can start."""
    provisional: StartRound | None = None
    """With what workers may be started ahead of a round; None if they may not, or have been already."""
    starting_ahead: bool = False
    """Whether workers that were started ahead of a round still run their script up to its function."""
    assignment: StartRound | None = None
    member: MemberState = MemberState.STOPPED
    launched: bool = False
    """Whether `LaunchWorkers` was decided for `assignment`; it waits until the launcher is ready."""
    running_ranks: frozenset[int] = frozenset()
    """Local ranks of the running workers."""
    last_step: int | None = None
    """The step at which the workers of `assignment` stop by themselves; None without a planned end."""
    last_step_seconds: float = 0.0
    """Seconds that the workers have for `last_step`, from the message that names it."""
    step_reported: bool = False
    """Whether this node has sent its `StepReport` for `assignment`."""
    stopping_gracefully: bool = False
    """Whether the stop in progress belongs to a planned end, which may take long."""
    stopped_as_planned: bool = False
    """Whether a worker of `assignment` has stopped at the last step."""
    results_ended: bool = False
    """Whether no worker of `assignment` counts a step any more, and they wait until no other node counts one either.
    """
    parked: bool = False
    """Whether processes wait for the next round."""
    has_state: bool = True
    """Whether this node may have a training state, as `WorkersStopped` reports."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What has to be started for the next round, as `WorkersStopped` reports; the count is 0 once that has begun."""
    failure: Failure | None = None
    """The first failure of `assignment` on this node."""
    stall: Failure | None = None
    """The last hang of `assignment` on this node that did not end the round."""
    after_stop: StartRound | Finish | None = None
    """The message to act on once no worker is left."""
    leaving: str = ""
    """Why this node leaves: a signal's name or a failed health check; empty while it stays."""
    signalled: bool = False
    """Whether the agent has received a signal on which it leaves; the next one kills the workers."""
    unhealthy: Failure | None = None
    """The failed health check; a node with one leaves."""
    leave_acknowledged: bool = False
    """Whether the coordinator has reacted to `Leaving`."""
    frozen: bool = False
    """Whether the workers are stopped with SIGSTOP, until the coordinator reports what became of their round."""

    @property
    def ready(self) -> bool:
        """Whether the node can start workers at once."""
        return self.launcher_ready and not self.starting_ahead

    @property
    def round(self) -> RoundId | None:
        return self.assignment.round if self.assignment else None
