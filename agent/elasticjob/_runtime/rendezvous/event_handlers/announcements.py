"""What follows from an agent that announces itself: it is a member, has an old round, is superseded, or waits. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    ANY_INDEX,
    Announce,
    Closed,
    EndRound,
    Finish,
    LastMembership,
    MemberState,
    Outcome,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous import store_recovery
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.event_handlers.agent_messages import with_ended_results
from elasticjob._runtime.rendezvous.event_handlers.standbys import stand_by
from elasticjob._runtime.rendezvous.rounds.ends.round_end import end_message
from elasticjob._runtime.rendezvous.rounds.stages import finished_again
from elasticjob._runtime.rendezvous.rounds.starts import confirmation
from elasticjob._runtime.rendezvous.state import (
    RECOVERY_TIMEOUT,
    CoordinatorState,
    KnownAgent,
    Member,
    Round,
    SendToAgent,
    agent_with_same_index,
    announces_unknown_round,
    may_run_workers,
    set_agent,
    set_member,
    superseded,
)


def receive_announcement(state: CoordinatorState, agent: KnownAgent, now: float) -> RoundDecision:
    """Return the state with an agent that has announced itself, and the answer to it."""
    agent_id = agent.agent_id
    if state.outcome is not None:
        finish = Finish(state.outcome, state.outcome_reason)
        reason = f"{agent.pod} announced itself after the end of the job"
        return RoundDecision(set_agent(state, agent), (SendToAgent(agent_id, finish),), reason)
    if announces_unknown_round(state, agent.membership) and (state.round is None or state.round.ending is not None):
        resumed = _resume_recovery(state, now)
        return resumed.then(receive_announcement(resumed.state, agent, now))
    other = agent_with_same_index(state, agent)
    if superseded(state, agent) and not _runs_workers(state, agent):
        finish = Finish(Outcome.SUPERSEDED, "Superseded", f"a newer pod has index {agent.index}")
        reason = f"{agent.pod} is superseded: a newer pod has index {agent.index}"
        return RoundDecision(state, (SendToAgent(agent_id, finish),), reason)
    closed = (SendToAgent(agent_id, Closed(state.closed_reason)),) if state.closed_reason else ()
    displaced = other if other is not None and not _keeps_its_index(state, other, agent) else None
    state = _remove_agent(state, displaced)
    answer = RoundDecision(state, (*_finish_displaced(displaced), *closed))
    if state.recovering_until is not None:
        if not state.agents:
            state = replace(state, recovering_until=now + RECOVERY_TIMEOUT)
        state = replace(state, announced_at=now) if state.took_over else state
        return answer.then(
            RoundDecision(set_agent(state, agent), reason=f"{agent.pod} announced itself during recovery")
        )
    return answer.then(_connect_agent(state, agent, now))


def _resume_recovery(state: CoordinatorState, now: float) -> RoundDecision:
    """Go back into recovery. A restored round that was ending is dropped: the round that was missed ran after it."""
    decision = RoundDecision(state)
    for agent_id, member in state.round.members.items() if state.round is not None else ():
        agent = decision.state.agents.get(agent_id)
        if agent is not None and not member.accounted_for:
            decision = decision.then(stop_stale_round(decision.state, agent, member.assignment.round))
    return replace(decision, state=store_recovery.resume_recovery(decision.state, now))


def _keeps_its_index(state: CoordinatorState, other: KnownAgent, agent: KnownAgent) -> bool:
    """Return whether `other` stays known although `agent` announces the same index.

    A newer agent stays. An older one stays too while it has workers: its pod is being deleted, and its workers have
    time to save. The end of the round waits for it as for every member that leaves.
    """
    newer = other.incarnation > agent.incarnation
    return newer or (other.incarnation < agent.incarnation and _runs_workers(state, other))


def _runs_workers(state: CoordinatorState, agent: KnownAgent) -> bool:
    """Return whether the agent runs workers of the current round, or of a round that this store may restore."""
    if state.recovering_until is None:
        return may_run_workers(state, agent)
    return agent.membership is not None and agent.membership.state is not MemberState.STOPPED


def _finish_displaced(agent: KnownAgent | None) -> tuple[SendToAgent, ...]:
    """Return the last message to an agent whose index another one took: otherwise it would wait forever."""
    if agent is None or agent.disconnected_at is not None:
        return ()
    why = f"another agent has announced itself with index {agent.index}"
    return (SendToAgent(agent.agent_id, Finish(Outcome.SUPERSEDED, "Superseded", why)),)


def agent_from_announcement(state: CoordinatorState, agent_id: str, announce: Announce, now: float) -> KnownAgent:
    """Return the agent that an `Announce` describes, with what this store knows of it from earlier connections."""
    known = state.agents.get(agent_id)
    index = announce.index
    if index == ANY_INDEX:
        index = known.index if known else _lowest_free_index(state, now)
    agent = KnownAgent(
        agent_id=agent_id,
        index=index,
        incarnation=announce.incarnation,
        pod=announce.pod,
        address=announce.address,
        store_port=announce.store_port,
        local_world_size=announce.local_world_size,
        role=announce.role,
        ready=announce.ready,
        membership=announce.membership,
        leaving_reason=known.leaving_reason if known else "",
        stale_round=known.stale_round if known else None,
        has_state=known.has_state if known else False,
        fork_disabled_reason=announce.fork_disabled_reason,
        store_vanished=announce.store_vanished,
        restartable=announce.restartable,
        hang_guard=announce.hang_guard,
        new_processes=announce.new_processes,
        knows_machine_end=announce.knows_machine_end,
        ended_in_time=known.ended_in_time if known else None,
    )
    last = announce.membership
    return with_ended_results(state, agent, last.assignment.round) if last and last.results_ended else agent


def _lowest_free_index(state: CoordinatorState, now: float) -> int:
    taken = {n.index for n in state.agents.values() if not n.expired(now)}
    return next(index for index in itertools.count() if index not in taken)


def _remove_agent(state: CoordinatorState, agent: KnownAgent | None) -> CoordinatorState:
    if agent is None:
        return state
    agents = dict(state.agents)
    del agents[agent.agent_id]
    return replace(state, agents=agents)


def _connect_agent(state: CoordinatorState, agent: KnownAgent, now: float) -> RoundDecision:
    """Add a connected agent: as a member of the current round, idle, or as one that must stop an older round."""
    member = state.round.members.get(agent.agent_id) if state.round else None
    if state.round is not None and member is not None and not member.lost:
        return _reconnect_member(state, agent, state.round, member, now)
    last = agent.membership
    if last is not None and last.state is not MemberState.STOPPED:
        return stop_stale_round(state, agent, last.assignment.round)
    state = set_agent(state, replace(agent, stale_round=None))
    state = confirmation.record_stopped_agent(state, agent.agent_id, last.assignment.round if last else None)
    return replace(stand_by(state, [state.agents[agent.agent_id]]), reason=f"{agent.pod} announced itself")


def stop_stale_round(state: CoordinatorState, agent: KnownAgent, stale_round: RoundId) -> RoundDecision:
    """End an older round that the agent still runs. It cannot join a round before its workers have stopped."""
    end = EndRound(stale_round, state.settings.stop_grace, "the job went on without this pod")
    state = set_agent(state, replace(agent, stale_round=stale_round))
    return RoundDecision(state, (SendToAgent(agent.agent_id, end),), f"{agent.pod} still runs round {stale_round}")


def _reconnect_member(
    state: CoordinatorState, agent: KnownAgent, round_: Round, member: Member, now: float
) -> RoundDecision:
    """Update a member from what its agent announces, and send again what it may have missed."""
    state = set_agent(state, agent)
    last = agent.membership
    if last is not None and last.assignment.round == round_.id:
        round_ = _with_announced(round_, agent.agent_id, last)
        state = replace(state, round=round_)
        if last.state is MemberState.STOPPED:
            return RoundDecision(state, reason=f"{agent.pod} reconnected")
        if round_.ending is None:
            # An agent that was cut off has frozen its workers. The assignment, sent again, lets it resume them.
            again = (SendToAgent(agent.agent_id, member.assignment), *finished_again(state, agent.agent_id, round_))
            return RoundDecision(state, again, f"{agent.pod} reconnected")
        end = end_message(state, round_, round_.ending, now)
        reason = f"{agent.pod} reconnected while its round ends"
        return RoundDecision(state, (SendToAgent(agent.agent_id, end),), reason)
    if round_.ending is not None:
        # It never received the assignment, and gets none now: no worker of the round runs there.
        stopped = replace(member, state=MemberState.STOPPED)
        state = replace(state, round=set_member(round_, agent.agent_id, stopped))
        return RoundDecision(state, reason=f"{agent.pod} reconnected without having started its round")
    reason = f"{agent.pod} reconnected without having received its assignment"
    return RoundDecision(state, (SendToAgent(agent.agent_id, member.assignment),), reason)


def _with_announced(round_: Round, agent_id: str, last: LastMembership) -> Round:
    member = round_.members[agent_id]
    stage = max(member.ended_stage, last.ended_stage)
    return set_member(round_, agent_id, replace(member, state=last.state, ended_stage=stage))
