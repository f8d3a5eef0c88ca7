"""When a round starts, and with which agents. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from elasticjob._runtime.contract.messages import HangAction
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.event_handlers.standbys import stand_by
from elasticjob._runtime.rendezvous.observations import slow_starts
from elasticjob._runtime.rendezvous.rounds.starts import confirmation, rank_assignment
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    KnownAgent,
    Round,
    SendToAgent,
    candidates,
    departure_reason,
    expected_pod,
    missing_pods,
    topology_of,
)


def form_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Start a round as soon as no further agent is expected, at the latest when the last call is over.

    Until then it may begin or cancel the last call, or ask the operator for a confirmation.

    The last call begins when `min_nodes` agents are there, and lasts `last_call_timeout` seconds. It limits the wait
    for pods that still start, and, where no operator tells which pods there are, for any agent.

    If a member of the last round is here and none is about to reconnect, at least `min_nodes` agents that are ready
    start at once, and the others join later. In all other cases the round has agents that are not ready too: they start
    their workers once they are.
    """
    if (
        state.round is not None
        or state.outcome is not None
        or state.recovering_until is not None
        or state.restart_delay is not None
        or state.closed_reason
    ):
        return None
    pool = candidates(state)
    has_survivor = not {n.agent_id for n in pool}.isdisjoint(state.last_members)
    ready = [n for n in pool if n.ready]
    if has_survivor and len(ready) < state.settings.target and _reconnecting_members(state, now):
        return None
    if has_survivor and len(ready) >= state.settings.min_nodes:
        without = slow_starts.without_slow_starts(state, ready, partial(_chosen, state))
        if without is not None:
            return _start_round(state, without.pool, without.reason, now, without.left_out)
        return _start_round(state, ready, "all agents that are ready", now)
    if len(pool) < state.settings.min_nodes:
        if state.last_call_at is None and state.confirmation_requested_at is None:
            return None
        return RoundDecision(replace(state, last_call_at=None, confirmation_requested_at=None))
    if len(pool) >= state.settings.target:
        return _start_round(state, pool, "the target is reached", now)
    if state.operator_seen and not any(missing_pods(state, ready=False)):
        return _start_round(state, pool, "no further worker pod is expected", now)
    if state.last_call_at is None:
        timeout = state.settings.last_call_timeout
        reason = f"last call: waiting up to {timeout:g} s for more worker pods"
        return RoundDecision(replace(state, last_call_at=now + timeout), reason=reason)
    return _start_round(state, pool, "the last call is over", now) if now >= state.last_call_at else None


def _reconnecting_members(state: CoordinatorState, now: float) -> list[KnownAgent]:
    """Return members of the last round whose link has just closed.

    Without them the round would start smaller, and end again as soon as they reconnect.
    """
    last = (state.agents.get(agent_id) for agent_id in state.last_members)
    return [n for n in last if n and n.disconnected_at is not None and not n.expired(now) and _may_return(state, n)]


def _may_return(state: CoordinatorState, agent: KnownAgent) -> bool:
    wanted = not state.operator_seen or expected_pod(state, agent.index) is not None
    return wanted and agent.index < state.settings.desired_pods and not departure_reason(state, agent)


def _chosen(state: CoordinatorState, pool: Sequence[KnownAgent]) -> list[KnownAgent]:
    """Return the agents of the pool that a round would have, in order of group rank."""
    settings = state.settings
    size, place = settings.round_size(len(pool)), partial(topology_of, state)
    return rank_assignment.choose_agents(pool, state.last_members, size, settings.desired_pods, place)


def _code(state: CoordinatorState, chosen: Sequence[KnownAgent]) -> str:
    """Return the digest of the code for a round of these agents.

    Without the operator's view a successor store takes that of the last round that they know: its own settings are of
    the time when its pod was created.
    """
    known = [n.membership.assignment for n in chosen if n.membership is not None]
    if state.operator_seen or not known:
        return state.settings.code
    return max(known, key=lambda assignment: assignment.round).code


def _start_round(
    state: CoordinatorState, pool: Sequence[KnownAgent], why: str, now: float, left_out: Sequence[KnownAgent] = ()
) -> RoundDecision | None:
    """Assign ranks to the chosen agents of the pool; if a confirmation is needed first, request it.

    `left_out`: agents outside the pool, which stand by like those of the pool that are not chosen.
    """
    if confirmation.needs_confirmation(state, now):
        requested = confirmation.request_confirmation(state, now)
        reason = f"{confirmation.describe_missing(state)}; the operator is asked whether this is the only store"
        return None if requested is None else RoundDecision(requested, reason=reason)
    settings, chosen = state.settings, _chosen(state, pool)
    round_id = RoundId(state.attempt, state.store_incarnation, state.round_number + 1)
    members = rank_assignment.assign_ranks(
        chosen,
        round_id,
        restarts=state.charged,
        max_restarts=settings.max_restarts,
        progress_timeout=settings.progress_timeout,
        hang_ends_round=settings.hang_action is not HangAction.EVENT,
        log_rules=settings.log_rules,
        finished_stages=state.finished_stages,
        launchers=state.launchers,
        code=_code(state, chosen),
        state_known=state.rounds == 0 or any(agent.has_state for agent in chosen),
    )
    state = replace(
        state,
        round=Round(round_id, members),
        round_number=round_id.number,
        rounds=state.rounds + 1,
        latest_round=round_id,
        last_members=tuple(members),
        last_call_at=None,
        joiners_since=None,
        confirmation_requested_at=None,
        confirmed_until=None,
    )
    effects = tuple(SendToAgent(agent_id, member.assignment) for agent_id, member in members.items())
    reason = f"round {round_id} starts with {with_noun(len(members), 'worker pod')}: {why}"
    started = RoundDecision(state, effects, reason)
    return started.then(stand_by(state, [n for n in (*pool, *left_out) if n.agent_id not in members]))
