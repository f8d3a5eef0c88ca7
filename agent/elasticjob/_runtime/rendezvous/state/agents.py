"""What a coordinator knows of one agent."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import (
    NO_NEW_PROCESSES,
    LastMembership,
    NewProcesses,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.state.time_limits import RECONNECT_GRACE


@dataclass(frozen=True)
class KnownAgent:
    """An agent that has announced itself, identified by its agent id."""

    agent_id: str
    index: int
    incarnation: int
    pod: str
    address: str
    store_port: int
    local_world_size: int
    role: str
    ready: bool = False
    leaving_reason: str = ""
    """Why the agent asked to leave; empty while it stays."""
    disconnected_at: float | None = None
    """When its link closed; None while it is connected."""
    stale_round: RoundId | None = None
    """An earlier round whose workers may still run in its pod. They must stop before the agent may join a round."""
    unresponsive: bool = False
    """Whether the agent is connected, but has not stopped the workers of `stale_round` in time."""
    membership: LastMembership | None = None
    """The last round that the agent had been in when it announced itself, and its state there at that time. During
    recovery the state follows the agent's messages."""
    fork_disabled_reason: str = ""
    """Why its workers start by exec although the user did not ask for that; empty if they are forked."""
    store_vanished: bool = False
    """Whether the Node of the store to which it was connected before is down or cut off."""
    restartable: bool = False
    """Whether it has reported that its workers' function can be called again."""
    hang_guard: str = ""
    """What ends a hang of its workers in place of torch's time-out; empty if torch's own time-out does."""
    knows_machine_end: bool = False
    """Whether it had been sent when its Node ends, at the time when it announced itself."""
    has_state: bool = False
    """Whether it may have a training state, as far as it has reported."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What it has to start for its next round, as it has reported. The count is 0 once it prestarts these processes."""
    results_ended: RoundId | None = None
    """The round of which its workers count no more steps, and for which they wait for `BreakRound`."""
    ended_in_time: RoundId | None = None
    """The last round for which it reported `NodeResultsEnded` as a member that was not lost: no other member had broken
    its collectives by then."""

    def expired(self, now: float) -> bool:
        """Return whether the agent has been disconnected for longer than the grace."""
        return self.disconnected_at is not None and now >= self.disconnected_at + RECONNECT_GRACE
