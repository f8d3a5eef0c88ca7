"""Two stores must never run two worlds: when a round needs the operator's confirmation "you are the only store". Pure.

A store that is cut off, or that was replaced while it was alive, sees nodes disconnect that go on training with its
successor. A round therefore needs the confirmation if half of the nodes of the last round, or more, are missing. The
store requests it when it needs it. The confirmation expires CONFIRMATION_SECONDS after the request, so that an answer
that was delayed on its way does not count. A successor that finds nothing of earlier rounds needs the confirmation too.
A first store that no operator has ever connected to needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticjob.contract.messages import MemberState, OperatorView
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.decision import count_missing
from elasticjob.rendezvous.state import CoordinatorState, LastRound, Round

CONFIRMATION_SECONDS = 10.0
"""How long a confirmation holds, in seconds after the request. The operator treats a store that may hold one as ended
only after at least this long (`plan.stores`)."""


def least_complete_round(state: CoordinatorState) -> LastRound:
    """Return, of the rounds that another store may know as the last one, the one with the most missing nodes."""
    return max((state.last_round, *state.attempted_rounds), key=lambda r: (r.half_missing, r.missing))


def describe_missing(state: CoordinatorState) -> str:
    """Return what makes a confirmation necessary, for the log and the report."""
    last = least_complete_round(state)
    return "earlier rounds are unknown" if last.id is None else count_missing(last.missing, last.size)


def needs_confirmation(state: CoordinatorState, now: float) -> bool:
    """Return whether no round may start until the operator has confirmed that this is the only store."""
    if not (state.operator_seen or state.successor) or not least_complete_round(state).half_missing:
        return False
    return state.confirmed_until is None or now >= state.confirmed_until


def request_confirmation(state: CoordinatorState, now: float) -> CoordinatorState | None:
    """Return the state with a new request; None while the last one is recent enough to be answered."""
    if state.confirmation_requested_at is not None and now < state.confirmation_requested_at + CONFIRMATION_SECONDS:
        return None
    return replace(state, confirmation_requested_at=now)


def open_request(state: CoordinatorState) -> float:
    """Return the open request as reports carry it: Unix seconds, 0 for none."""
    return 0.0 if state.confirmation_requested_at is None else round(state.epoch + state.confirmation_requested_at, 6)


def half_missing_round(state: CoordinatorState) -> RoundId | None:
    """Return the last round if a request is open and exactly half of that round's nodes are missing; else None.

    In that case the missing nodes cannot form a round without a confirmation either.
    """
    exactly_half = not state.attempted_rounds and 2 * state.last_round.missing == state.last_round.size
    return state.last_round.id if state.confirmation_requested_at is not None and exactly_half else None


def receive_confirmation(state: CoordinatorState, view: OperatorView) -> CoordinatorState:
    """Return the state with the confirmation, if the operator's view answers the open request."""
    if state.confirmation_requested_at is None or view.confirmed_request != open_request(state):
        return state
    return replace(state, confirmed_until=state.confirmation_requested_at + CONFIRMATION_SECONDS)


def record_ended_round(state: CoordinatorState, round_: Round) -> CoordinatorState:
    """Record a round that has ended.

    If all its workers had started, it becomes the last round. Otherwise some of its nodes may not have received their
    assignment and may still count for another store as nodes of the round before: it is kept beside that one.
    """
    connected = {agent_id for agent_id, node in state.nodes.items() if node.disconnected_at is None}
    stopped = frozenset(agent_id for agent_id, m in round_.members.items() if m.state is MemberState.STOPPED)
    ended = LastRound(round_.id, round_.size, stopped & connected, stopped - connected)
    if round_.formed_at or state.last_round.id is None:
        return replace(state, last_round=ended, attempted_rounds=())
    lost = frozenset(agent_id for agent_id, m in round_.members.items() if m.lost)
    last, *attempted = (
        replace(r, stopped=r.stopped - lost, stopped_disconnected=r.stopped_disconnected | r.stopped & lost)
        for r in (state.last_round, *state.attempted_rounds)
    )
    return replace(state, last_round=last, attempted_rounds=(*attempted, ended))


def record_stopped_node(state: CoordinatorState, agent_id: str, round_id: RoundId) -> CoordinatorState:
    """Record that a connected node runs no workers of `round_id`, nor of the rounds that it had stopped before."""
    return _update_rounds(
        state, lambda r: agent_id in r.stopped_disconnected or r.id == round_id, agent_id, connected=True
    )


def record_disconnected_node(state: CoordinatorState, agent_id: str) -> CoordinatorState:
    """Record that a node disconnected: another store may start workers there, so it counts as missing again.

    A node that was released with `Finish` is removed from the state first, and still counts as stopped.
    """
    return _update_rounds(state, lambda r: agent_id in r.stopped, agent_id, connected=False)


def _update_rounds(
    state: CoordinatorState, applies: Callable[[LastRound], bool], agent_id: str, *, connected: bool
) -> CoordinatorState:
    rounds = (state.last_round, *state.attempted_rounds)
    if not any(applies(r) for r in rounds):
        return state
    last, *attempted = (_with_stopped_node(r, agent_id, connected=connected) if applies(r) else r for r in rounds)
    return replace(state, last_round=last, attempted_rounds=tuple(attempted))


def _with_stopped_node(r: LastRound, agent_id: str, *, connected: bool) -> LastRound:
    node = frozenset((agent_id,))
    return replace(
        r,
        stopped=r.stopped | node if connected else r.stopped - node,
        stopped_disconnected=r.stopped_disconnected - node if connected else r.stopped_disconnected | node,
    )
