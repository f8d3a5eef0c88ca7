"""Two stores at once must not make two worlds: when a round needs the operator's word "you are the only store". Pure.

A store that was cut off, or that was taken for dead, sees nodes vanish that train on with its successor. So a round
from which half of the last one is missing waits for the word. It is asked for when it is needed, and holds for a time
after the asking: an answer that was long on its way is none. A successor that finds nothing of the past needs it too.
A store that no operator ever spoke to goes without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticjob.contract.messages import Facts, MemberState
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import LastRound, Round, State

WORD_HOLDS = 10.0
"""Seconds after the asking. The operator takes who may have the word for gone (`plan.stores`) after no less."""


def shortest(state: State) -> LastRound:
    """Of the rounds that another store may know as the last, the one of which most is missing."""
    return max((state.last, *state.tried), key=lambda r: (r.short, r.missing))


def words(state: State) -> str:
    """For people."""
    last = shortest(state)
    return f"{last.missing} of {last.size} nodes are missing"


def needs_word(state: State, now: float) -> bool:
    """Whether no round may form before the operator has spoken."""
    if not (state.informed or state.successor) or not shortest(state).short:
        return False
    return state.word_until is None or now >= state.word_until


def ask(state: State, now: float) -> State | None:
    """With the question; None while one is open."""
    if state.asked_at is not None and now < state.asked_at + WORD_HOLDS:
        return None
    return replace(state, asked_at=now)


def asks(state: State) -> float:
    """The open question as the operator gets it: Unix seconds, 0 for none."""
    return 0.0 if state.asked_at is None else round(state.epoch + state.asked_at, 6)


def half(state: State) -> RoundId | None:
    """The last round, where there is a question and just half of that is missing: the others can form none by
    themselves either."""
    just = not state.tried and 2 * state.last.missing == state.last.size
    return state.last.id if state.asked_at is not None and just else None


def heard(state: State, facts: Facts) -> State:
    """Take the operator's answer to the question that is open, if it is one."""
    if state.asked_at is None or facts.only_store != asks(state):
        return state
    return replace(state, word_until=state.asked_at + WORD_HOLDS)


def ended(state: State, round_: Round) -> State:
    """What is known of a round that has ended here. Until one has run whole, nodes of the one before may not know."""
    here = {b for b, node in state.nodes.items() if node.gone_at is None}
    stopped = frozenset(b for b, m in round_.members.items() if m.state is MemberState.STOPPED)
    over = LastRound(round_.id, round_.size, stopped & here, stopped - here)
    if round_.formed_at or state.last.id is None:
        return replace(state, last=over, tried=())
    lost = frozenset(b for b, m in round_.members.items() if m.lost)
    before = (replace(r, stopped=r.stopped - lost, away=r.away | r.stopped & lost) for r in (state.last, *state.tried))
    last, *tried = before
    return replace(state, last=last, tried=(*tried, over))


def stopped(state: State, boot: str, round_id: RoundId) -> State:
    """A node that was given up, or was away, runs nothing."""
    return _each(state, lambda r: boot in r.away or r.id == round_id, boot, here=True)


def gone(state: State, boot: str) -> State:
    """A node's link closed: another store may have it run something by now. (One that may go is known no more.)"""
    return _each(state, lambda r: boot in r.stopped, boot, here=False)


def _each(state: State, concerns: Callable[[LastRound], bool], boot: str, *, here: bool) -> State:
    if not any(concerns(r) for r in (state.last, *state.tried)):
        return state
    moved = (_moved(r, boot, here=here) if concerns(r) else r for r in (state.last, *state.tried))
    last, *tried = moved
    return replace(state, last=last, tried=tuple(tried))


def _moved(r: LastRound, boot: str, *, here: bool) -> LastRound:
    one = frozenset((boot,))
    return replace(r, stopped=r.stopped | one if here else r.stopped - one, away=r.away - one if here else r.away | one)
