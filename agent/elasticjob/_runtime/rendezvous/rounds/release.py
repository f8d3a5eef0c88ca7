"""Which agents outside the round are released, so that their pods end. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import Finish, Outcome
from elasticjob._runtime.rendezvous.decision import RoundDecision, pod_names
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    KnownAgent,
    SendToAgent,
    departure_reason,
    superseded,
)


def release_departing_agents(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Send `Finish` to agents outside the round that are leaving; if the rendezvous is closed, to all outside it."""
    if state.recovering_until is not None or state.outcome is not None:
        return None
    members = state.round.members.keys() if state.round else ()
    outside = [n for n in state.agents.values() if n.disconnected_at is None and n.agent_id not in members]
    departing = [n for n in outside if state.closed_reason or departure_reason(state, n)]
    if not departing:
        return None
    effects = tuple(SendToAgent(n.agent_id, _release_message(state, n)) for n in departing)
    released = {n.agent_id for n in departing}
    agents = {agent_id: n for agent_id, n in state.agents.items() if agent_id not in released}
    return RoundDecision(replace(state, agents=agents), effects, f"{pod_names(n.pod for n in departing)} released")


def _release_message(state: CoordinatorState, agent: KnownAgent) -> Finish:
    if superseded(state, agent):
        return Finish(Outcome.SUPERSEDED, "Superseded", departure_reason(state, agent))
    if state.closed_reason:
        return Finish(Outcome.LEFT, "RendezvousClosed", state.closed_reason)
    return Finish(Outcome.LEFT, "NodeLeft", departure_reason(state, agent))
