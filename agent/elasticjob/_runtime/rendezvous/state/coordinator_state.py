"""Everything that a coordinator knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticjob._runtime.contract.failures.restart_window import RestartWindow
from elasticjob._runtime.contract.messages import (
    ExpectedPod,
    Failure,
    OperatorView,
    Outcome,
    RoundEnded,
    RoundSettings,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.state.agents import KnownAgent
from elasticjob._runtime.rendezvous.state.round import NO_LAST_ROUND, UNKNOWN_LAST_ROUND, LastRound, RestartDelay, Round
from elasticjob._runtime.rendezvous.state.time_limits import RECOVERY_TIMEOUT

MAX_ENDED_ROUNDS = 256
"""Ended rounds that wait for an operator. Without a limit every report of a job that has none would grow."""


@dataclass(frozen=True)
class CoordinatorState:
    """Everything that a coordinator knows.

    Times are seconds of its own monotonic clock; `epoch` is the Unix time of that clock's zero.
    """

    attempt: int
    store_incarnation: int
    operator_view: OperatorView
    operator_seen: bool = False
    """Whether an operator has sent its view to this store."""
    pods: Mapping[int, ExpectedPod] = field(default_factory=dict)
    """`operator_view.pods` by index."""
    agents: Mapping[str, KnownAgent] = field(default_factory=dict)
    """By agent id."""
    agent_ids: Mapping[int, str] = field(default_factory=dict)
    """By index: the id of the agent that announced itself last. It may have been removed from `agents` since."""
    round: Round | None = None
    round_number: int = 0
    """Number of the last round that this store started or restored."""
    rounds: int = 0
    """How many rounds this store has started or restored."""
    latest_round: RoundId | None = None
    """The newest of them; None before the first."""
    last_members: tuple[str, ...] = ()
    """Agent ids of the last round in order of group rank. Members that stay keep their order."""
    finished_stages: int = 0
    """How many stages of the command are finished (`rounds.stages`)."""
    launchers: tuple[str, ...] = ()
    """`StageBegan.launcher` of each stage so far, of the first agent that reached it."""
    last_call_at: float | None = None
    """When the last call ends; None while there is none."""
    shortest_stop: float | None = None
    """Seconds in which the workers of a round have stopped, the least of all rounds that this store has ended; None
    before the first."""
    restart_delay: RestartDelay | None = None
    """Keeps the next round from starting; None while nothing does."""
    joiners_since: float | None = None
    """Since when ready agents have waited to join the running round; None while none waits."""
    recovering_until: float | None = None
    """When recovery ends at the latest; None once it is over."""
    recovery_failures: Mapping[RoundId, tuple[Failure, ...]] = field(default_factory=dict)
    """By round: the failures that agents reported during recovery, in order of arrival. Empty once it is over."""
    passive: bool = False
    """Whether this is a standby store that has not taken over: it decides nothing."""
    retired: bool = False
    """Whether this passive standby store never takes over, because the operator demanded it."""
    restarted: bool = False
    """Whether this standby store may have been active before: its container restarted. Only the operator activates
    it then, and it confirms no retirement."""
    known_round: RoundId | None = None
    """The newest round that an operator has named in a view (`OperatorView.newest_round`)."""
    took_over: bool = False
    """Whether this store was a standby store and has become active."""
    announced_at: float = 0.0
    """When the last agent announced itself, or the store took over. Set during the recovery of a standby store only."""
    successor: bool = False
    """Whether another store of the job, or an earlier process of this one, ran before."""
    last_round: LastRound = NO_LAST_ROUND
    """The last round whose workers all started."""
    attempted_rounds: tuple[LastRound, ...] = ()
    """Later rounds whose workers did not all start: some members may not have received their assignment."""
    confirmation_requested_at: float | None = None
    """When this store asked the operator to confirm that it is the only one; None if no request is open."""
    confirmed_until: float | None = None
    """Until when the operator's confirmation holds; None without one."""
    confirmed_half: bool = False
    """Whether the confirmation holds only while no more than half of the last round's members are missing."""
    newer_store: int | None = None
    """The higher incarnation of a store to which an agent has connected: this store is closed then. None without
    one."""
    ended_rounds: tuple[RoundEnded, ...] = ()
    """Rounds that ended and that the operator has not acknowledged yet, the oldest first; at most MAX_ENDED_ROUNDS."""
    forgotten_charges: int = 0
    """Charged restarts of rounds that `ended_rounds` had no place for."""
    node_ends: Mapping[str, float] = field(default_factory=dict)
    """By pod name: when the pod's Node ends, where that is announced (see the module `node_ends`)."""
    unhealthy: Mapping[str, Failure] = field(default_factory=dict)
    """By pod name: why the agent asked for a replacement on another Node. Kept after the agent has left."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """By pod name: why the pod is replaced after a failure (restartStrategy Recreate, or a rule). Kept after the agent
    has left: one whose link closes just then announces itself again."""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    failure: Failure | None = None
    """The root cause of a FAILED outcome."""
    closed_reason: str = ""
    """Why no further round may start, as an agent asked (torch's `set_closed`); empty while rounds may start."""
    epoch: float = 0.0

    @property
    def settings(self) -> RoundSettings:
        return self.operator_view.settings

    def is_outdated(self, round_id: RoundId) -> bool:
        """Return whether the operator knows a newer round: this one need not be the last."""
        return self.known_round is not None and round_id < self.known_round

    @property
    def charged(self) -> int:
        """Restarts charged to the budget: those in status, and those that status does not contain yet."""
        return self._restarts.count

    def charged_at(self, time: float) -> int:
        """Return the restarts that count if a failure happens at this time, Unix seconds."""
        return self._restarts.at(time, self.settings.restart_window).count

    @property
    def _restarts(self) -> RestartWindow:
        view = self.operator_view
        restarts = RestartWindow(view.charged + self.forgotten_charges, view.charged_since)
        for ended in self.ended_rounds:
            if ended.charged and not self.is_counted(ended.round):
                restarts = restarts.with_restart(ended.time, self.settings.restart_window)
        return restarts

    def is_counted(self, round_id: RoundId) -> bool:
        """Return whether status accounts for this round already."""
        view = self.operator_view
        return round_id in view.charged_rounds or (view.charged_round is not None and round_id <= view.charged_round)


def initial_state(
    settings: RoundSettings,
    *,
    attempt: int,
    store: int,
    now: float,
    epoch: float = 0.0,
    recovering: bool = False,
    round_number: int = 0,
    standby: bool = False,
    restarted: bool = False,
) -> CoordinatorState:
    """Return the state of a coordinator that starts.

    `recovering` is true for every store but the first of an attempt. The first round gets number `round_number` + 1.
    `standby`: the store is a passive standby store; `restarted`: an earlier process of it ran before.
    """
    return CoordinatorState(
        attempt,
        store,
        OperatorView(lease=-1, sequence=-1, settings=settings, charged=0, charged_round=None),
        round_number=round_number,
        recovering_until=now + RECOVERY_TIMEOUT if recovering or standby else None,
        passive=standby,
        restarted=standby and restarted,
        successor=recovering or standby,
        last_round=UNKNOWN_LAST_ROUND if recovering or standby else NO_LAST_ROUND,
        epoch=epoch,
    )


def add_ended_round(state: CoordinatorState, ended: RoundEnded) -> CoordinatorState:
    """Return the state with one more ended round. If there are too many, the oldest that was not charged is dropped."""
    kept = (*state.ended_rounds, ended)
    if len(kept) <= MAX_ENDED_ROUNDS:
        return replace(state, ended_rounds=kept)
    drop = next((n for n, e in enumerate(kept) if not e.charged), 0)
    forgotten = state.forgotten_charges + kept[drop].charged
    return replace(state, ended_rounds=(*kept[:drop], *kept[drop + 1 :]), forgotten_charges=forgotten)
