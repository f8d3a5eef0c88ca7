"""When the collectives of a round that ends may be broken. Pure.

If devices work asynchronously to the host, an abort on one rank may end a collective of another rank as if it had
succeeded, with part of the result. So each member first reports that its workers count no more steps
(`NodeResultsEnded`), and none breaks its collectives before all have reported it, have stopped, or are lost. An agent
that was lost, and reports it later, may have counted a broken result. It must not use its state.

In names, an agent that has reported this has *ended its results*: its workers may still run, and count no step.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import BreakRound
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, SendToAgent, has_ended_results, set_agent


def break_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Answer the agents whose workers count no more steps of their round, once no other member counts any."""
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
    """Return whether others may have broken their collectives while this agent, then lost, still counted steps."""
    member = state.round.members.get(agent.agent_id) if state.round else None
    is_member = member is not None and not member.lost and has_ended_results(state, agent.agent_id)
    return not is_member and agent.ended_in_time != agent.results_ended


def _all_have_ended(state: CoordinatorState) -> bool:
    round_ = state.round
    if round_ is None:
        return True
    ending = round_.ending is not None
    return ending and all(m.accounted_for or has_ended_results(state, a) for a, m in round_.members.items())
