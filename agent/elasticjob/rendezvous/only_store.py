"""Two stores at once must not make two worlds: when a round needs the operator's word "you are the only store". Pure.

A store that was cut off, or that was taken for dead, sees nodes vanish that train on with its successor. So a round
from which half of the last one is missing waits for the word. It is asked for when it is needed, and holds for as long
after the asking as the operator waits in silence before it gives a store up: an answer that was long on its way is
none. A successor that finds nothing of the past needs it too. A store that no operator ever spoke to goes without.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob.contract.messages import Facts, MemberState, WorkersStopped
from elasticjob.rendezvous.state import LastRound, Node, Round, State

WORD_HOLDS = 10.0
"""Seconds after the asking. The operator gives a store up (`plan.stores`) after no less."""


def missing(state: State) -> int:
    """Nodes of the last round of which nobody knows whether they still run it."""
    return state.last.size - len(state.last.stopped)


def needs_word(state: State, now: float) -> bool:
    """Whether no round may form before the operator has spoken."""
    if not (state.informed or state.successor) or not missing(state) or 2 * missing(state) < state.last.size:
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


def heard(state: State, facts: Facts) -> State:
    """Take the operator's answer to the question that is open, if it is one."""
    if state.asked_at is None or facts.only_store != asks(state):
        return state
    return replace(state, word_until=state.asked_at + WORD_HOLDS)


def ended(round_: Round) -> LastRound:
    """What is known of a round that has ended here."""
    stopped = (b for b, m in round_.members.items() if m.state is MemberState.STOPPED)
    return LastRound(round_.id, round_.size, frozenset(stopped))


def stopped(state: State, node: Node, message: WorkersStopped) -> State:
    """A node that was given up has stopped after all."""
    if message.round != state.last.id:
        return state
    return replace(state, last=replace(state.last, stopped=state.last.stopped | {node.boot}))
