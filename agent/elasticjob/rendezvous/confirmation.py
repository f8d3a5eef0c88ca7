"""Two stores at once must not make two worlds: when a round needs the operator's word "you are the only store". Pure.

A store that was cut off, or that was taken for dead, sees nodes vanish that train on with its successor. So a round
from which half of the last one is missing waits for the word. It is asked for when it is needed, and holds for a time
after the asking: an answer that was long on its way is none. A successor that finds nothing of the past needs it too.
A store that no operator ever spoke to goes without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticjob.contract.messages import MemberState, OperatorView
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import CoordinatorState, LastRound, Round

CONFIRMATION_SECONDS = 10.0
"""Seconds after the asking. The operator takes who may have the word for gone (`plan.stores`) after no less."""


def least_complete_round(state: CoordinatorState) -> LastRound:
    """Of the rounds that another store may know as the last, the one of which most is missing."""
    return max((state.last_round, *state.attempted_rounds), key=lambda r: (r.half_missing, r.missing))


def describe_missing(state: CoordinatorState) -> str:
    """For people."""
    last = least_complete_round(state)
    return f"{last.missing} of {last.size} nodes are missing"


def needs_confirmation(state: CoordinatorState, now: float) -> bool:
    """Whether no round may form before the operator has spoken."""
    if not (state.operator_seen or state.successor) or not least_complete_round(state).half_missing:
        return False
    return state.confirmed_until is None or now >= state.confirmed_until


def request_confirmation(state: CoordinatorState, now: float) -> CoordinatorState | None:
    """With the question; None while one is open."""
    if state.confirmation_requested_at is not None and now < state.confirmation_requested_at + CONFIRMATION_SECONDS:
        return None
    return replace(state, confirmation_requested_at=now)


def open_request(state: CoordinatorState) -> float:
    """The open question as the operator gets it: Unix seconds, 0 for none."""
    return 0.0 if state.confirmation_requested_at is None else round(state.epoch + state.confirmation_requested_at, 6)


def half_missing_round(state: CoordinatorState) -> RoundId | None:
    """The last round, where there is a question and just half of that is missing: the others can form none by
    themselves either."""
    just = not state.attempted_rounds and 2 * state.last_round.missing == state.last_round.size
    return state.last_round.id if state.confirmation_requested_at is not None and just else None


def receive_confirmation(state: CoordinatorState, facts: OperatorView) -> CoordinatorState:
    """Take the operator's answer to the question that is open, if it is one."""
    if state.confirmation_requested_at is None or facts.confirmed_request != open_request(state):
        return state
    return replace(state, confirmed_until=state.confirmation_requested_at + CONFIRMATION_SECONDS)


def record_ended_round(state: CoordinatorState, round_: Round) -> CoordinatorState:
    """What is known of a round that has ended here. Until one has run whole, nodes of the one before may not know."""
    here = {b for b, node in state.nodes.items() if node.disconnected_at is None}
    stopped = frozenset(b for b, m in round_.members.items() if m.state is MemberState.STOPPED)
    over = LastRound(round_.id, round_.size, stopped & here, stopped - here)
    if round_.formed_at or state.last_round.id is None:
        return replace(state, last_round=over, attempted_rounds=())
    lost = frozenset(b for b, m in round_.members.items() if m.lost)
    before = (
        replace(r, stopped=r.stopped - lost, stopped_disconnected=r.stopped_disconnected | r.stopped & lost)
        for r in (state.last_round, *state.attempted_rounds)
    )
    last, *tried = before
    return replace(state, last_round=last, attempted_rounds=(*tried, over))


def record_stopped_node(state: CoordinatorState, agent_id: str, round_id: RoundId) -> CoordinatorState:
    """A node that was given up, or was away, runs nothing."""
    return _each(state, lambda r: agent_id in r.stopped_disconnected or r.id == round_id, agent_id, here=True)


def record_disconnected_node(state: CoordinatorState, agent_id: str) -> CoordinatorState:
    """A node's link closed: another store may have it run something by now. (One that may go is known no more.)"""
    return _each(state, lambda r: agent_id in r.stopped, agent_id, here=False)


def _each(
    state: CoordinatorState, concerns: Callable[[LastRound], bool], agent_id: str, *, here: bool
) -> CoordinatorState:
    if not any(concerns(r) for r in (state.last_round, *state.attempted_rounds)):
        return state
    moved = (_moved(r, agent_id, here=here) if concerns(r) else r for r in (state.last_round, *state.attempted_rounds))
    last, *tried = moved
    return replace(state, last_round=last, attempted_rounds=tuple(tried))


def _moved(r: LastRound, agent_id: str, *, here: bool) -> LastRound:
    one = frozenset((agent_id,))
    return replace(
        r,
        stopped=r.stopped | one if here else r.stopped - one,
        stopped_disconnected=r.stopped_disconnected - one if here else r.stopped_disconnected | one,
    )
