"""Which members of a round are lost, or need not be waited for. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    MemberState,
)
from elasticjob._runtime.rendezvous.decision import RoundDecision, pod_names
from elasticjob._runtime.rendezvous.rounds.ends.round_end import stop_deadline
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    Member,
    departure_reason,
    has_ended_results,
    set_agent,
)


def expire_lost_members(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Mark members as lost whose agents do not reconnect in time, or do not stop their workers by `stop_deadline`.

    An agent that is leaving gets no time to reconnect. A member that waits for BreakRound (`round_break`) is not late.
    """
    round_ = state.round
    if round_ is None:
        return None
    stopping = round_.ending is not None and round_.ending.planned_stop is None
    overdue = stopping and round_.ending is not None and now >= stop_deadline(state, round_.ending)
    connected = {agent_id for agent_id, n in state.agents.items() if n.disconnected_at is None}
    late = {a for a in round_.members if overdue and not has_ended_results(state, a)}
    lost = {
        a: None
        for a, member in round_.members.items()
        if not member.accounted_for and (a in late or (a not in connected and _is_lost(state, a, member, now)))
    }
    if not lost:
        return None
    members = {
        a: replace(m, lost=True, unresponsive=a in connected) if a in lost else m for a, m in round_.members.items()
    }
    state = replace(state, round=replace(round_, members=members))
    for agent_id in lost:
        if agent_id in state.agents:
            agent = replace(state.agents[agent_id], stale_round=round_.id, unresponsive=agent_id in connected)
            state = set_agent(state, agent)
    return RoundDecision(state, reason=f"{pod_names(members[a].pod for a in lost)} lost")


def mark_finished_as_stopped(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Mark members as stopped that have succeeded and left a closed rendezvous, now that their round ends.

    No further round forms, so their agents do not report that their workers have stopped.
    """
    round_ = state.round
    if round_ is None or round_.ending is None or not state.closed_reason:
        return None
    gone = {a for a, m in round_.members.items() if _has_finished(state, m) and _will_not_reconnect(state, a, now)}
    if not gone:
        return None
    members = {a: replace(m, state=MemberState.STOPPED) if a in gone else m for a, m in round_.members.items()}
    return RoundDecision(replace(state, round=replace(round_, members=members)))


def _has_finished(state: CoordinatorState, member: Member) -> bool:
    """Return whether no round needs the member any more: its workers succeeded, and no further round will form."""
    return bool(state.closed_reason) and member.state is MemberState.SUCCEEDED and not member.lost


def _is_lost(state: CoordinatorState, agent_id: str, member: Member, now: float) -> bool:
    return not _has_finished(state, member) and _will_not_reconnect(state, agent_id, now)


def _will_not_reconnect(state: CoordinatorState, agent_id: str, now: float) -> bool:
    agent = state.agents.get(agent_id)
    if agent is None or agent.expired(now):
        return True
    # A disconnected agent that is leaving does not come back: it gets no grace. Without an operator it is unknown what
    # Kubernetes does with the pod, so the grace applies.
    return agent.disconnected_at is not None and bool(state.operator_seen and departure_reason(state, agent))
