"""The end of recovery: the round that a successor store found goes on, or ends, or there is none. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import MemberState
from elasticjob._runtime.rendezvous import store_recovery
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.event_handlers.announcements import stop_stale_round
from elasticjob._runtime.rendezvous.event_handlers.standbys import stand_by
from elasticjob._runtime.rendezvous.rounds.ends.round_end import (
    begin_end,
)
from elasticjob._runtime.rendezvous.rounds.stages import finished_again
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    SendToAgent,
)


def finish_recovery(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Restore the round that a successor store found, or end it, or go on without one."""
    recovery = store_recovery.evaluate_recovery(state, now)
    if recovery is None:
        return None
    found = recovery.round
    state = replace(state, recovering_until=None, recovery_failures={})
    outsiders = [n for n in state.agents.values() if found is None or n.agent_id not in found.members]
    decision = RoundDecision(state, reason=recovery.reason)
    for agent in outsiders:
        if agent.membership is not None and agent.membership.state is not MemberState.STOPPED:
            decision = decision.then(stop_stale_round(decision.state, agent, agent.membership.assignment.round))
    if found is None:
        return replace(decision, state=store_recovery.with_last_round(decision.state))
    # Each store incarnation numbers its own rounds.
    own = found.id.store_incarnation == state.store_incarnation
    state = replace(
        decision.state,
        round=found,
        round_number=max(state.round_number, found.id.number) if own else state.round_number,
        rounds=state.rounds + 1,
        latest_round=found.id,
        last_members=tuple(found.members),
    )
    decision = replace(decision, state=state)
    if recovery.end is None:
        assignments = tuple(
            message
            for agent_id, member in found.members.items()
            for message in (SendToAgent(agent_id, member.assignment), *finished_again(state, agent_id, found))
        )
        continued = replace(decision, effects=decision.effects + assignments)
        # One that has to start processes begins now: it is not to be taken into a round before they wait.
        waiting = [n for n in outsiders if n.disconnected_at is None and state.agents[n.agent_id].stale_round is None]
        return continued.then(stand_by(state, waiting))
    return decision.then(begin_end(state, found, recovery.end, recovery.reason, now))
