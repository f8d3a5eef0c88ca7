"""The current round, the end of it, and what remains known of rounds that are over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticjob._runtime.contract.messages import (
    EndReason,
    Failure,
    MemberState,
    StartRound,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.persistent_map import with_item


@dataclass(frozen=True)
class Member:
    """An agent's part in the current round."""

    assignment: StartRound
    pod: str
    local_world_size: int
    state: MemberState = MemberState.STARTING
    lost: bool = False
    unresponsive: bool = False
    """Whether it was connected when it was lost: it did not stop its workers in time, so they may still run."""
    ended_stage: int = 0
    """The last stage that it has reported as ended in this round; 0: none."""

    @property
    def accounted_for(self) -> bool:
        """Whether the round's end does not wait for it: it has stopped, or is lost (its workers may still run then)."""
        return self.lost or self.state is MemberState.STOPPED


@dataclass(frozen=True)
class PlannedStop:
    """The negotiation of a planned end (see `planned_end`)."""

    steps: Mapping[str, int | None] = field(default_factory=dict)
    """The step that each member reported, by agent id."""
    last_step: int | None = None
    """The step after which all workers stop; None until all members have reported."""


@dataclass(frozen=True)
class RoundEnding:
    """Why and since when a round is being stopped."""

    reason: EndReason
    message: str
    since: float
    planned: bool = False
    """Whether the end was begun as a planned one."""
    planned_stop: PlannedStop | None = None
    """None if the members stop at once, from the start or after the plan has failed."""
    kill_at: float = 0.0
    """When the grace period of workers that get SIGTERM is over."""


@dataclass(frozen=True)
class Round:
    """The current round."""

    id: RoundId
    members: Mapping[str, Member]
    """By agent id, in order of group rank."""
    formed_at: float = 0.0
    """Unix seconds at which all workers had started; 0 before."""
    ending: RoundEnding | None = None
    failures: tuple[Failure, ...] = ()
    """In order of arrival."""
    ended_ranks: tuple[tuple[int, ...], ...] = ()
    """The ranks that had succeeded before the round ended, of each member that has reported some."""
    stall_reports: Mapping[str, Failure] = field(default_factory=dict)
    """The last stall that each agent reported, by agent id. Used where a hang does not end the round."""
    stall_pending: tuple[str, ...] = ()
    """Agent ids of the members that have reported the present stall; empty once its cause is found."""
    stall_since: float = 0.0
    """When the first of them reported it."""
    stall: Failure | None = None
    """The worker to blame for the last stall."""

    @property
    def world_size(self) -> int:
        return sum(m.local_world_size for m in self.members.values())

    @property
    def size(self) -> int:
        """The number of members that the round started with, including those that a successor store did not find."""
        return max(m.assignment.group_world_size for m in self.members.values())


@dataclass(frozen=True)
class RestartDelay:
    """Since when, and after which restart, no round starts (see `restart_delay`)."""

    since: float
    restarts: int
    """Restarts that counted then; 1 or more."""


@dataclass(frozen=True)
class LastRound:
    """What this store knows of a round that is over (see `confirmation`)."""

    id: RoundId | None
    """None if there was none, or if it is unknown."""
    size: int
    """The number of members that the round started with."""
    stopped: frozenset[str]
    """Ids of connected agents that have stopped their workers of the round."""
    stopped_disconnected: frozenset[str] = frozenset()
    """Ids of agents that had stopped their workers but are no longer connected. They count as missing again."""
    pods: Mapping[str, str] = field(default_factory=dict)
    """By agent id: the pods of its members, as far as this store knows them."""
    unresponsive: frozenset[str] = frozenset()
    """Ids of members that were connected and did not stop their workers in time."""

    @property
    def missing(self) -> int:
        """The number of members that may still run workers."""
        return self.size - len(self.stopped)

    @property
    def lacks_majority(self) -> bool:
        """Whether half of its members or more are missing, so that those which are here are not more than half.

        The missing ones may then go on with another store. Compare `confirmation.exactly_half_missing_round`.
        """
        return self.missing > 0 and 2 * self.missing >= self.size


NO_LAST_ROUND = LastRound(id=None, size=0, stopped=frozenset())
"""There was no earlier round."""


UNKNOWN_LAST_ROUND = LastRound(id=None, size=1, stopped=frozenset())
"""Unknown history: an older round may still be running."""


def set_member(round_: Round, agent_id: str, member: Member) -> Round:
    """Return the round with this member replaced."""
    return replace(round_, members=with_item(round_.members, agent_id, member))
