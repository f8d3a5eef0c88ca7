"""Hangs that are told and end nothing (`hangPolicy.action: Event`): one word of many, and whom it names. Pure.

Every node notices a standstill by itself. Who is to be named is known when all have told where their workers stand, or
a moment after the first.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob.contract.messages import WorkersStalled
from elasticjob.diagnosis import root_cause
from elasticjob.rendezvous.decision import Decision
from elasticjob.rendezvous.state import Node, State

SETTLE = 3.0
"""Seconds that workers of one standstill may have made their last steps apart."""


def heard(state: State, node: Node, message: WorkersStalled, now: float) -> State:
    """Take in the word of one node; said again after a reconnect it is no news."""
    round_ = state.round
    if round_ is None or message.round != round_.id or node.boot not in round_.members:
        return state
    if round_.stalled.get(node.boot) == message.failure:
        return state
    round_ = replace(
        round_,
        stalled={**round_.stalled, node.boot: message.failure},
        stalling=(*round_.stalling, node.boot),
        stalled_since=round_.stalled_since if round_.stalling else now,
    )
    return replace(state, round=round_)


def deadline(state: State) -> float | None:
    """When a standstill is to be told at the latest; None: there is none to tell."""
    round_ = state.round
    return round_.stalled_since + SETTLE if round_ is not None and round_.stalling else None


def tell(state: State, now: float) -> Decision | None:
    """Name the worker to blame, once for all nodes."""
    round_, due = state.round, deadline(state)
    if round_ is None or due is None or (now < due and not round_.members.keys() <= set(round_.stalling)):
        return None
    cause = root_cause(round_.stalled[boot] for boot in round_.stalling)
    return Decision(
        replace(state, round=replace(round_, stalling=(), standstill=cause)),
        reason=f"round {round_.id} makes no progress" + (f": rank {cause.rank} in {cause.pod}" if cause else ""),
    )
