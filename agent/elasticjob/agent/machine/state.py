"""Where an agent stands. What moves it is in `machine`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticjob.contract.messages import (
    Announce,
    Failure,
    Finish,
    MemberState,
    StartRound,
)
from elasticjob.contract.names import RoundId


class AgentPhase(str, Enum):
    """Where an agent stands."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class AgentState:
    """An agent. `assignment` is the last round it was in, running or over, `member` what became of it there."""

    announcement: Announce
    """What is announced, but for `ready` and `membership`; its store port is the one of the next round."""
    stop_grace: float
    phase: AgentPhase = AgentPhase.IDLE
    processes: int | None = None
    """How many workers are this agent's own to start; None: all that it announces."""
    launcher_ready: bool = False
    assignment: StartRound | None = None
    member: MemberState = MemberState.STOPPED
    launched: bool = False
    """Whether workers of `assignment` were asked for: not before the node is warm."""
    running_ranks: frozenset[int] = frozenset()
    """Local ranks that run."""
    last_step: int | None = None
    """Where the workers of `assignment` were told to stop by themselves."""
    stopped_on_plan: bool = False
    """Whether one of them did."""
    failure: Failure | None = None
    """The first of `assignment`'s failures here."""
    stall: Failure | None = None
    """The last standstill of `assignment`'s workers here, where that ends nothing."""
    after_stop: StartRound | Finish | None = None
    """What to do once no worker is left."""
    leaving: str = ""
    unhealthy: Failure | None = None
    """Why this node is not fit to train; it is leaving then."""
    leave_acknowledged: bool = False
    """Whether the coordinator has reacted to our leaving."""
    frozen: bool = False
    """The workers stand still until the coordinator says that their round goes on, or has ended."""

    @property
    def round(self) -> RoundId | None:
        return self.assignment.round if self.assignment else None
