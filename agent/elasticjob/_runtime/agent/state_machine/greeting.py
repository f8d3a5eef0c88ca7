"""What an agent sends to the coordinator about itself."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.state import AgentState, Idle, Running
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    LastMembership,
    Leaving,
    MemberState,
    WorkersFailed,
    WorkersStalled,
    WorkersStopped,
)
from elasticjob._runtime.contract.names import RoundId


def greeting(state: AgentState) -> tuple[AgentToCoordinator, ...]:
    """Return an agent's first messages on a new link: its announcement, then all that an old link may have lost."""
    round_, is_idle = state.last_round, isinstance(state.activity, Idle)
    membership = None
    if round_ is not None:
        # Announce FAILED even if the workers have stopped by now: a new coordinator must learn both the failure and
        # the stop.
        member = MemberState.FAILED if round_.failure and is_idle else round_.member
        # Only the store that sent the assignment needs the members' addresses, and it has them. Without them every
        # announcement is smaller.
        start = replace(round_.start, member_addresses=())
        results_ended = bool(state.stopping and state.stopping.results_ended)
        membership = LastMembership(start, member, results_ended, round_.ended_stage)
    announcement = replace(state.announcement, new_processes=state.new_processes)
    messages: list[AgentToCoordinator] = [replace(announcement, ready=state.ready, membership=membership)]
    if round_ is not None and round_.failure is not None:
        messages.append(WorkersFailed(round_.id, round_.failure))
    if round_ is not None and round_.stall is not None and isinstance(state.activity, Running):
        messages.append(WorkersStalled(round_.id, round_.stall))
    if round_ is not None and is_idle:
        messages.append(workers_stopped(state, round_.id))
    if state.leave is not None:
        messages.append(Leaving(state.leave.reason, state.leave.unhealthy))
    return tuple(messages)


def workers_stopped(state: AgentState, round_id: RoundId) -> WorkersStopped:
    """Return the message that no worker of the round is left in this pod, and what the agent has for the next one."""
    port, new = state.announcement.store_port, state.new_processes
    return WorkersStopped(round_id, port, has_state=state.has_state, new_processes=new)
