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
    """A node that has announced itself, identified by its agent id."""

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
    """Why the node asked to leave; empty while it stays."""
    disconnected_at: float | None = None
    """When its link closed; None while it is connected."""
    stale_round: RoundId | None = None
    """An earlier round whose workers may still run on the node. They must stop before the node may join a round."""
    unresponsive: bool = False
    """Whether the node is connected, but has not stopped the workers of `stale_round` in time."""
    membership: LastMembership | None = None
    """The last round that the node had been in when it announced itself, and its state there at that time. During
    recovery the state follows the node's messages."""
    fork_disabled_reason: str = ""
    """Why its workers start by exec although the user did not ask for that; empty if they are forked."""
    store_vanished: bool = False
    """Whether the machine of the store that it was connected to before is down or cut off."""
    restartable: bool = False
    """Whether it has reported that its workers' function can be called again."""
    hang_guard: str = ""
    """What ends a hang of its workers in place of torch's time-out; empty if that is not so."""
    knows_machine_end: bool = False
    """Whether it had been sent the end of its machine when it announced itself."""
    has_state: bool = False
    """Whether it may have a training state, as far as it has reported."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What it has to start for its next round, as it has reported; the count is 0 once it starts that ahead."""
    results_ended: RoundId | None = None
    """The round of which its workers count no step any more, and wait for `BreakRound`."""
    ended_in_time: RoundId | None = None
    """The last round of which it said so as a member that was not lost: no other node had broken its collectives."""

    def expired(self, now: float) -> bool:
        """Return whether the node has been disconnected for longer than the grace."""
        return self.disconnected_at is not None and now >= self.disconnected_at + RECONNECT_GRACE
