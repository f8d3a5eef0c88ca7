"""How one event changes the state, and the direct answers to it. `rounds` then applies the rules. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    Announce,
    Close,
    Closed,
    QueryClosed,
    StoreActive,
    WorkersStopped,
)
from elasticjob._runtime.rendezvous import node_ends
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.event_handlers.agent_messages import apply_agent_message
from elasticjob._runtime.rendezvous.event_handlers.announcements import agent_from_announcement, receive_announcement
from elasticjob._runtime.rendezvous.event_handlers.operator_views import apply_operator_view, changed_standby_store
from elasticjob._runtime.rendezvous.event_handlers.standbys import (
    stand_by,
    stand_by_outside,
    standby_message,
    waits_with_starts,
)
from elasticjob._runtime.rendezvous.rounds.stages import with_known_stages
from elasticjob._runtime.rendezvous.rounds.starts import confirmation, restart_delay
from elasticjob._runtime.rendezvous.state import (
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
    NewerStoreSeen,
    OperatorViewReceived,
    SendToAgent,
    Tick,
    set_agent,
)


def apply_event(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Return the state with one event applied, and the direct answers to it. A closed store ignores all events."""
    if state.newer_store is not None:
        return RoundDecision(state)
    if isinstance(event, NewerStoreSeen):
        return _apply_newer_store(state, event.incarnation)
    if isinstance(event, AgentMessage) and isinstance(event.message, Announce):
        announce = event.message
        state = with_known_stages(state, announce.finished_stages, announce.launchers)
    if state.passive:
        return _apply_to_standby_store(state, event, now)
    if isinstance(event, AgentMessage):
        if isinstance(event.message, Announce):
            announced = receive_announcement(
                state, agent_from_announcement(state, event.agent_id, event.message, now), now
            )
            return _with_node_end(_with_messages_about_stores(announced, event.agent_id), event.agent_id, now)
        if isinstance(event.message, Close):
            return _apply_close(state, event.agent_id, event.message)
        if isinstance(event.message, QueryClosed):
            return RoundDecision(state, _answer_visitor(state, event.agent_id))
        agent = state.agents.get(event.agent_id)
        if agent is None:
            return RoundDecision(state)
        after = apply_agent_message(state, agent, event.message, now)
        found_restartable = after.agents[event.agent_id].restartable and not agent.restartable
        if found_restartable:
            return stand_by_outside(after)
        stopped_late = isinstance(event.message, WorkersStopped) and waits_with_starts(after, event.agent_id)
        return stand_by(after, [after.agents[event.agent_id]]) if stopped_late else RoundDecision(after)
    if isinstance(event, AgentDisconnected):
        agent = state.agents.get(event.agent_id)
        if agent is None:
            return RoundDecision(state)
        state = confirmation.record_disconnected_agent(state, event.agent_id)
        return RoundDecision(set_agent(state, replace(agent, disconnected_at=now)), reason=f"{agent.pod} disconnected")
    if isinstance(event, OperatorViewReceived):
        after = restart_delay.delay_after_view(state, apply_operator_view(state, event.view, now), now)
        ends = node_ends.changed_ends(state, after, now)
        return RoundDecision(after, (*changed_standby_store(state, after), *ends))
    _: Tick = event
    return RoundDecision(state)


def _apply_to_standby_store(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Record an event at a passive standby store. An agent that disconnects has returned to the present store."""
    if isinstance(event, OperatorViewReceived):
        state = apply_operator_view(state, event.view, now)
        return RoundDecision(replace(state, retired=state.operator_view.retired and not state.restarted))
    if isinstance(event, AgentDisconnected):
        agents = {agent_id: n for agent_id, n in state.agents.items() if agent_id != event.agent_id}
        rounds = {n.membership.assignment.round for n in agents.values() if n.membership is not None}
        failures = {r: f for r, f in state.recovery_failures.items() if r in rounds}
        return RoundDecision(replace(state, agents=agents, recovery_failures=failures))
    if not isinstance(event, AgentMessage) or isinstance(event.message, (Close, QueryClosed)):
        return RoundDecision(state)
    if isinstance(event.message, Announce):
        agent = agent_from_announcement(state, event.agent_id, event.message, now)
        return RoundDecision(set_agent(state, agent), reason=f"{agent.pod} announced itself at this standby store")
    known = state.agents.get(event.agent_id)
    return RoundDecision(state if known is None else apply_agent_message(state, known, event.message, now))


def _with_messages_about_stores(decision: RoundDecision, agent_id: str) -> RoundDecision:
    """Return the decision with what an agent that has announced itself must know about this store and the next one.

    When the agent connected, this store may still have been passive.
    """
    active = (SendToAgent(agent_id, StoreActive()),) if decision.state.took_over else ()
    standby = decision.state.operator_view.standby_store
    stays = agent_id in decision.state.agents
    address = (SendToAgent(agent_id, standby),) if standby is not None and stays else ()
    return replace(decision, effects=(*active, *decision.effects, *address))


def _with_node_end(decision: RoundDecision, agent_id: str, now: float) -> RoundDecision:
    """Return the decision with the time at which the Node of an announced agent ends, if it is known."""
    agent = decision.state.agents.get(agent_id)
    ends = node_ends.known_ends(decision.state, [agent] if agent is not None else [], now)
    return replace(decision, effects=(*decision.effects, *ends))


def _apply_newer_store(state: CoordinatorState, incarnation: int) -> RoundDecision:
    """Close this store: the operator has replaced it."""
    if incarnation <= state.store_incarnation:
        return RoundDecision(state)
    reason = f"store closed: store {incarnation} has taken over"
    return RoundDecision(replace(state, newer_store=incarnation), reason=reason)


def _apply_close(state: CoordinatorState, agent_id: str, message: Close) -> RoundDecision:
    """Close the rendezvous for good. Once an operator has connected, only it decides when the job ends."""
    if state.closed_reason or state.operator_seen:
        return RoundDecision(state, _answer_visitor(state, agent_id))
    reason = message.reason or "an agent closed it"
    effects = tuple(SendToAgent(other, Closed(reason)) for other in state.agents)
    state = replace(state, closed_reason=reason)
    return RoundDecision(state, effects + _answer_visitor(state, agent_id), f"rendezvous closed: {reason}")


def _answer_visitor(state: CoordinatorState, agent_id: str) -> tuple[SendToAgent, ...]:
    """Return the answer to a visitor. An agent gets none, because it is sent `Closed` anyway."""
    if agent_id in state.agents:
        return ()
    reason = state.closed_reason or state.outcome_reason
    return (SendToAgent(agent_id, Closed(reason) if reason else standby_message(state, None)),)
