"""When the collectives of a round that ends may be broken. Pure.

Where devices work behind the host, an abort on one rank may end a collective of another one as if it had succeeded,
with part of the result. So every rank says first that it counts no step any more (`NodeResultsEnded`), and none breaks
its collectives before all have: those whose workers have stopped, and those that are lost, count as well. A node that
was lost, and says it later, may have counted a broken result. It must not use its state.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import BreakRound
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, SendToAgent, has_ended_results, set_agent


def break_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Answer the nodes that count no step of their round any more, once no other node of it does."""
    if state.recovering_until is not None:
        return None
    waiting = [n for n in state.agents.values() if n.results_ended is not None and n.disconnected_at is None]
    if not waiting:
        return None
    all_have = _all_have_ended(state)
    answered = [n for n in waiting if all_have or not has_ended_results(state, n.agent_id) or _is_late(state, n)]
    if not answered:
        return None
    effects = tuple(
        SendToAgent(n.agent_id, BreakRound(n.results_ended, _is_late(state, n))) for n in answered if n.results_ended
    )
    for agent in answered:
        state = set_agent(state, replace(agent, results_ended=None))
    return RoundDecision(state, effects)


def _is_late(state: CoordinatorState, agent: KnownAgent) -> bool:
    """Return whether others may have broken their collectives while the node counted steps: it was lost then."""
    member = state.round.members.get(agent.agent_id) if state.round else None
    is_member = member is not None and not member.lost and has_ended_results(state, agent.agent_id)
    return not is_member and agent.ended_in_time != agent.results_ended


def _all_have_ended(state: CoordinatorState) -> bool:
    round_ = state.round
    if round_ is None:
        return True
    ending = round_.ending is not None
    return ending and all(m.accounted_for or has_ended_results(state, a) for a, m in round_.members.items())
