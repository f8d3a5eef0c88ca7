"""The standby store: a successor that the operator creates before the present store is lost. Pure.

A standby store is *passive*: it collects what agents announce, and neither answers nor decides. Agents that lose the
present store announce themselves here, and return to the present store if it answers first. The standby store takes
over, which makes it an ordinary store that recovers, when

* status names it (the operator says so), or
* more than half of the members of the newest round that it knows are connected to it at the same time. The present
  store then misses half of that round or more, and starts no round without the operator's confirmation
  (docs/contribute/store-loss.md, "Why this is safe").

It waits only briefly for the missing agents, because they have lost the present store for the same reason.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import NO_STANDBY_STORE, StoreActive
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.rendezvous import node_ends
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.event_handlers.announcements import receive_announcement
from elasticjob._runtime.rendezvous.state import RECOVERY_TIMEOUT, CoordinatorState, SendToAgent
from elasticjob._runtime.rendezvous.store_recovery import count_newest_round


def take_over(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Make a passive standby store active, if it may take over. It then recovers with the agents that are connected."""
    if not state.passive or state.retired:
        return None
    if state.operator_view.serving == state.store_incarnation:
        return _activate(state, "status names this store", now)
    connected, size = count_newest_round(state)
    if not has_majority(state):
        return None
    reason = f"{connected} of {with_noun(size, 'worker pod')} of the running round are connected to this standby store"
    return _activate(state, reason, now)


def has_majority(state: CoordinatorState) -> bool:
    """Return whether more than half of the newest round is connected, so that the operator need not decide.

    The operator does decide if an earlier process of this store may have been active, or if none has sent its view yet.
    """
    connected, size = count_newest_round(state)
    return state.operator_seen and not state.restarted and 2 * connected > size


def may_end(state: CoordinatorState, *, without_standby: bool) -> bool:
    """Return whether a store that was asked to end may do so now, without cost for its agents.

    It may if it is not the job's store, or no agent is connected, or the job has ended. Otherwise it first finishes
    ending the current round (a successor would not know the grace periods), or waits until a starting round runs. Then
    it waits, unless `without_standby`, until its agents know a standby store, to which they move with their round.
    """
    if state.passive or state.newer_store is not None or state.outcome is not None:
        return True
    if all(n.disconnected_at is not None for n in state.agents.values()):
        return True
    if state.round is not None and (state.round.ending is not None or not state.round.formed_at):
        return False
    known = (state.operator_view.standby_store or NO_STANDBY_STORE).host
    return bool(known) or without_standby or not state.operator_seen or state.settings.max_nodes == 1


def _activate(state: CoordinatorState, reason: str, now: float) -> RoundDecision:
    agents = list(state.agents.values())
    active = replace(
        state,
        passive=False,
        took_over=True,
        announced_at=now,
        recovering_until=now + RECOVERY_TIMEOUT,
        agents={},
        agent_ids={},
    )
    decision = RoundDecision(active, tuple(SendToAgent(n.agent_id, StoreActive()) for n in agents), reason)
    for agent in agents:
        decision = decision.then(replace(receive_announcement(decision.state, agent, now), reason=""))
    ends = node_ends.known_ends(decision.state, decision.state.agents.values(), now)
    return replace(decision, effects=(*decision.effects, *ends))
