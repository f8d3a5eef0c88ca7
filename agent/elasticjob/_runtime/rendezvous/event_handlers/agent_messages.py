"""What an agent's messages, after its `Announce`, change. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    Close,
    Leaving,
    MemberState,
    NewerStore,
    NodeResultsEnded,
    QueryClosed,
    Ready,
    StageBegan,
    StageEnded,
    StateReceived,
    StepReport,
    StepTimes,
    TrainingProgress,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous import store_recovery
from elasticjob._runtime.rendezvous.observations import stalls
from elasticjob._runtime.rendezvous.persistent_map import with_item
from elasticjob._runtime.rendezvous.rounds import stages
from elasticjob._runtime.rendezvous.rounds.ends import planned_end
from elasticjob._runtime.rendezvous.rounds.starts import confirmation
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    KnownAgent,
    set_agent,
)


def with_ended_results(state: CoordinatorState, agent: KnownAgent, round_id: RoundId) -> KnownAgent:
    """Return the agent as one whose workers count no more steps of a round; record whether it reported that in time."""
    member = state.round.members.get(agent.agent_id) if state.round and state.round.id == round_id else None
    in_time = member is not None and not member.lost
    return replace(agent, results_ended=round_id, ended_in_time=round_id if in_time else agent.ended_in_time)


def apply_agent_message(
    state: CoordinatorState, agent: KnownAgent, message: AgentToCoordinator, now: float
) -> CoordinatorState:
    if isinstance(message, Ready):
        agent = replace(
            agent,
            ready=True,
            fork_disabled_reason=message.fork_disabled_reason,
            restartable=message.restartable,
            hang_guard=message.hang_guard,
            new_processes=replace(agent.new_processes, count=0),
        )
        return set_agent(state, agent)
    if isinstance(message, Leaving):
        if message.failure is not None:
            state = replace(state, unhealthy={**state.unhealthy, agent.pod: message.failure})
        return set_agent(state, replace(agent, leaving_reason=message.reason or "the agent asked to leave"))
    if isinstance(message, (Announce, Close, NewerStore, QueryClosed, StepTimes, TrainingProgress, StateReceived)):
        return state
    if isinstance(message, StepReport):
        return _apply_step_report(state, agent, message)
    if isinstance(message, StageBegan):
        return stages.record_launcher(state, message)
    if isinstance(message, StageEnded):
        return stages.record_stage(state, agent, message)
    if isinstance(message, NodeResultsEnded):
        return set_agent(state, with_ended_results(state, agent, message.round))
    if isinstance(message, WorkersStalled):
        return stalls.record_stall(state, agent, message, now)
    if isinstance(message, WorkersStopped):
        stale = agent.stale_round if agent.stale_round and agent.stale_round > message.round else None
        announced = agent.membership.assignment.round if agent.membership else message.round
        if stale is None and message.round >= announced:
            state = confirmation.record_stopped_agent(state, agent.agent_id, message.round)
        unresponsive = agent.unresponsive and stale is not None
        agent = replace(
            agent,
            store_port=message.store_port,
            stale_round=stale,
            results_ended=None,
            unresponsive=unresponsive,
            has_state=message.has_state,
            new_processes=message.new_processes,
        )
        state = set_agent(state, agent)
    return apply_worker_state(state, agent, message)


_REACHED = {
    WorkersStarted: MemberState.RUNNING,
    WorkersFailed: MemberState.FAILED,
    WorkersSucceeded: MemberState.SUCCEEDED,
    WorkersStopped: MemberState.STOPPED,
}


_STATE_ORDER = {
    MemberState.STARTING: 0,
    MemberState.RUNNING: 1,
    MemberState.SUCCEEDED: 2,
    MemberState.FAILED: 2,
    MemberState.STOPPED: 3,
}


def apply_worker_state(
    state: CoordinatorState,
    agent: KnownAgent,
    message: WorkersStarted | WorkersFailed | WorkersSucceeded | WorkersStopped,
) -> CoordinatorState:
    """Apply a message about workers of the current round from a member that is not lost; ignore all others.

    States of members only move forward. During recovery the message updates what the agent announced.
    """
    round_ = state.round
    if state.recovering_until is not None:
        return store_recovery.record_message(state, state.agents[agent.agent_id], message, _REACHED[type(message)])
    if round_ is None or message.round != round_.id:
        return state
    member = round_.members.get(agent.agent_id)
    if member is None or member.lost:
        return state
    members, failures, ended_ranks = round_.members, round_.failures, round_.ended_ranks
    if isinstance(message, WorkersFailed):
        failures = (*failures, message.failure)
    reached = _REACHED[type(message)]
    if _STATE_ORDER[reached] > _STATE_ORDER[member.state]:
        members = with_item(members, agent.agent_id, replace(member, state=reached))
    if isinstance(message, WorkersStopped) and message.ended_ranks:
        ended_ranks = (*ended_ranks, message.ended_ranks)
    return replace(state, round=replace(round_, members=members, failures=failures, ended_ranks=ended_ranks))


def _apply_step_report(state: CoordinatorState, agent: KnownAgent, report: StepReport) -> CoordinatorState:
    round_ = state.round
    if round_ is None or report.round != round_.id or agent.agent_id not in round_.members:
        return state
    return replace(state, round=planned_end.record_step(round_, agent.agent_id, report))
