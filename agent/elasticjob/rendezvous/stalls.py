"""Hangs that are told and end nothing (`hangPolicy.action: Event`): one word of many, and whom it names. Pure.

Every node notices a standstill by itself. Who is to be named is known when all have told where their workers stand, or
a moment after the first.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob.contract.messages import WorkersStalled
from elasticjob.diagnosis import root_cause
from elasticjob.rendezvous.decision import RoundDecision
from elasticjob.rendezvous.state import CoordinatorState, Node

STALL_REPORT_SECONDS = 3.0
"""Seconds that workers of one standstill may have made their last steps apart."""


def record_stall(state: CoordinatorState, node: Node, message: WorkersStalled, now: float) -> CoordinatorState:
    """Take in the word of one node; said again after a reconnect it is no news."""
    round_ = state.round
    if round_ is None or message.round != round_.id or node.agent_id not in round_.members:
        return state
    if round_.stall_reports.get(node.agent_id) == message.failure:
        return state
    round_ = replace(
        round_,
        stall_reports={**round_.stall_reports, node.agent_id: message.failure},
        stall_pending=(*round_.stall_pending, node.agent_id),
        stall_since=round_.stall_since if round_.stall_pending else now,
    )
    return replace(state, round=round_)


def stall_deadline(state: CoordinatorState) -> float | None:
    """When a standstill is to be told at the latest; None: there is none to tell."""
    round_ = state.round
    return round_.stall_since + STALL_REPORT_SECONDS if round_ is not None and round_.stall_pending else None


def name_stalled_worker(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Name the worker to blame, once for all nodes."""
    round_, due = state.round, stall_deadline(state)
    if round_ is None or due is None or (now < due and not round_.members.keys() <= set(round_.stall_pending)):
        return None
    cause = root_cause(round_.stall_reports[agent_id] for agent_id in round_.stall_pending)
    return RoundDecision(
        replace(state, round=replace(round_, stall_pending=(), stall=cause)),
        reason=f"round {round_.id} makes no progress" + (f": rank {cause.rank} in {cause.pod}" if cause else ""),
    )
