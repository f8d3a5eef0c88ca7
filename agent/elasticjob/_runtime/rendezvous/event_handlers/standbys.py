"""What agents outside the round are sent while they wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    Standby,
    StartRound,
)
from elasticjob._runtime.contract.names import PRESTART_ROUND
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    KnownAgent,
    Round,
    SendToAgent,
    is_restartable,
    set_agent,
)


def standby_message(state: CoordinatorState, agent: KnownAgent | None) -> Standby:
    """Return the message for a connected agent outside the round, or for a visitor (None)."""
    if state.round is None:
        return Standby("waiting for more worker pods")
    provisional = _provisional_start(state, state.round, agent) if agent is not None else None
    if state.round.ending is not None:
        return Standby("waiting for the next round", provisional=provisional)
    if provisional is not None and agent is not None and agent.new_processes.count:
        reason = "a round runs without this pod until its new processes are at their function"
        return Standby(reason, provisional=provisional)
    if len(state.round.members) >= state.settings.target:
        return Standby("the round is full without this pod", redundant=True, provisional=provisional)
    return Standby("a round runs without this pod", provisional=provisional)


def stand_by(state: CoordinatorState, agents: Iterable[KnownAgent]) -> RoundDecision:
    """Send connected agents outside the round why they wait.

    An agent that lacks processes prestarts them, and is not ready until they wait at their function (`Ready`).
    """
    effects = []
    for agent in agents:
        message = standby_message(state, agent)
        effects.append(SendToAgent(agent.agent_id, message))
        if message.provisional is not None and agent.new_processes.count:
            state = set_agent(state, replace(agent, ready=False, new_processes=replace(agent.new_processes, count=0)))
    return RoundDecision(state, tuple(effects))


def stand_by_outside(state: CoordinatorState) -> RoundDecision:
    members = state.round.members if state.round else {}
    return stand_by(
        state, [n for n in state.agents.values() if n.disconnected_at is None and n.agent_id not in members]
    )


def waits_with_starts(state: CoordinatorState, agent_id: str) -> bool:
    """Return whether an agent outside the running round has to start processes and has not begun."""
    agent = state.agents[agent_id]
    outside = state.round is not None and agent_id not in state.round.members
    return outside and agent.ready and agent.new_processes.count > 0


def _provisional_start(state: CoordinatorState, round_: Round, agent: KnownAgent) -> StartRound | None:
    """Return `Standby.provisional`; None unless the function of this job can be called again."""
    if not is_restartable(state):
        return None
    members = [n for agent_id in round_.members if (n := state.agents.get(agent_id))]
    own, other = agent.local_world_size, next(iter(round_.members.values())).assignment
    role_size = sum(member.local_world_size for member in members if member.role == agent.role)
    return replace(
        other,
        round=PRESTART_ROUND,
        group_rank=other.group_world_size,
        group_world_size=other.group_world_size + 1,
        rank=other.world_size,
        world_size=other.world_size + own,
        role_rank=role_size,
        role_world_size=role_size + own,
        master_addr="",
        master_port=0,
        member_addresses=(),
    )
