"""After which events of a batch the rules need not run. Pure.

To run the rules costs time for every agent, so `rounds.decide_together` runs them once for many events that arrived
together. What is charged must not depend on that. Therefore the rules run before and after each event that may end a
round, the recovery or the job, and before and after each that changes what the end of a round means. They wait only if
`rules_may_wait` knows that an event is none of these. That check costs the same in a job of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob._runtime.contract.messages import (
    ANY_INDEX,
    Announce,
    Close,
    Leaving,
    MemberState,
    NodeResultsEnded,
    PodState,
    StageEnded,
    StepReport,
    SuccessPolicy,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.rendezvous.state import (
    RECONNECT_GRACE,
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
    KnownAgent,
    Member,
    PlannedStop,
    Round,
    announces_unknown_round,
    departure_reason,
    has_ended_results,
    is_in_stage,
)

_NEVER = 2**62


@dataclass(frozen=True)
class OpenCounts:
    """What is still missing until a rule applies. `follow` updates the counts by one event."""

    unstopped: int = 0
    """Members of the round whose workers may run."""
    not_succeeded: int = 0
    """Members of the round whose workers have not succeeded."""
    starting: int = 0
    """Members of the round whose workers have not all started."""
    in_stage: int = 0
    """Members of the round that have neither reported the end of the present stage nor succeeded."""
    counting: int = 0
    """Members of the round whose workers may run, and count steps: `round_break` waits for these."""
    connected: int = 0
    """Connected agents; counted during recovery only."""
    wanted: int = _NEVER
    """Connected agents without which recovery does not end before its time-out."""


@dataclass(frozen=True)
class Settled:
    """Summary of a state on which the rules have run: the next event is checked without a look at every agent."""

    until: float | None
    """No rule applies before this time unless an event comes; None: ever."""
    counts: OpenCounts


def count_open(state: CoordinatorState) -> OpenCounts:
    """Return the counts of a state."""
    if state.recovering_until is not None:
        connected = [n for n in state.agents.values() if n.disconnected_at is None]
        sizes = [n.membership.assignment.group_world_size for n in connected if n.membership is not None]
        if state.operator_seen:
            sizes.append(sum(p.state is PodState.RUNNING for p in state.pods.values()))
        return OpenCounts(connected=len(connected), wanted=min(sizes, default=_NEVER))
    members = state.round.members.values() if state.round else ()
    return OpenCounts(
        unstopped=sum(not m.accounted_for for m in members),
        not_succeeded=sum(m.state is not MemberState.SUCCEEDED for m in members),
        starting=sum(m.state is MemberState.STARTING for m in members),
        in_stage=sum(is_in_stage(state, m) for m in members),
        counting=sum(_counts_steps(state, agent_id) for agent_id in state.round.members) if state.round else 0,
    )


def _counts_steps(state: CoordinatorState, agent_id: str) -> bool:
    member = _member(state, agent_id)
    return member is not None and not member.accounted_for and not has_ended_results(state, agent_id)


def follow(counts: OpenCounts, before: CoordinatorState, after: CoordinatorState, agent_id: str) -> OpenCounts:
    """Return the counts after an event of this agent."""
    if after.recovering_until is not None:
        old, new = before.agents.get(agent_id), after.agents.get(agent_id)
        size = new.membership.assignment.group_world_size if new and new.membership else counts.wanted
        connected = counts.connected + _is_connected(new) - _is_connected(old)
        return replace(counts, connected=connected, wanted=min(counts.wanted, size))
    was, now = _member(before, agent_id), _member(after, agent_id)
    if was is None or now is None:
        return counts
    counting = counts.counting + _counts_steps(after, agent_id) - _counts_steps(before, agent_id)
    if was is now:
        return counts if counting == counts.counting else replace(counts, counting=counting)
    succeeded = (now.state is MemberState.SUCCEEDED) - (was.state is MemberState.SUCCEEDED)
    started = (was.state is MemberState.STARTING) - (now.state is MemberState.STARTING)
    return OpenCounts(
        unstopped=counts.unstopped + was.accounted_for - now.accounted_for,
        not_succeeded=counts.not_succeeded - succeeded,
        starting=counts.starting - started,
        in_stage=counts.in_stage + is_in_stage(after, now) - is_in_stage(before, was),
        counting=counting,
    )


def _is_connected(agent: KnownAgent | None) -> bool:
    return agent is not None and agent.disconnected_at is None


def _member(state: CoordinatorState, agent_id: str) -> Member | None:
    return state.round.members.get(agent_id) if state.round else None


def rules_may_wait(state: CoordinatorState, event: CoordinatorEvent, counts: OpenCounts, now: float) -> bool:
    """Return whether the rules may wait until the end of the batch.

    To run them just before and just after this event, which comes next, would not change what is charged, its cause,
    the outcome, or whether a joining agent ends the round.
    """
    if not isinstance(event, (AgentMessage, AgentDisconnected)):
        return False
    if state.recovering_until is not None:
        return _recovery_may_wait(state, event, counts, now)
    if isinstance(event, AgentMessage) and isinstance(event.message, Close):
        return bool(state.closed_reason or state.operator_seen)
    announce = event.message if isinstance(event, AgentMessage) and isinstance(event.message, Announce) else None
    if announce is not None and announces_unknown_round(state, announce.membership):
        return False
    round_ = state.round
    if round_ is None or state.outcome is not None:
        return True
    if announce is not None:
        return _announcement_may_wait(state, round_, event.agent_id, announce)
    member, agent = round_.members.get(event.agent_id), state.agents.get(event.agent_id)
    if agent is None:
        return True
    if member is None or member.lost:
        # A joining agent may end a running round. One that left in the meantime must not prevent that.
        gone = isinstance(event, AgentDisconnected) or isinstance(event.message, Leaving)
        return round_.ending is not None or not gone
    if isinstance(event, AgentDisconnected):
        return member.accounted_for or not departure_reason(state, agent)
    return agent.disconnected_at is None and _message_may_wait(state, round_, member, event, counts)


def _recovery_may_wait(
    state: CoordinatorState, event: AgentMessage | AgentDisconnected, counts: OpenCounts, now: float
) -> bool:
    """Return whether recovery goes on after this event, because too few agents are connected."""
    wanted = counts.wanted
    deadline = state.announced_at + RECONNECT_GRACE if state.took_over else state.recovering_until
    due = deadline is not None and now >= deadline and bool(state.agents)
    if isinstance(event, AgentMessage) and isinstance(event.message, Announce) and event.message.membership is not None:
        wanted = min(wanted, event.message.membership.assignment.group_world_size)
    if state.passive:
        # A standby store takes over with more than half of a round. The end of recovery is decided after that.
        return 2 * (counts.connected + 1) <= wanted
    return not due and counts.connected + 1 < wanted


def _announcement_may_wait(state: CoordinatorState, round_: Round, agent_id: str, announce: Announce) -> bool:
    """Return whether an announcement takes no other agent's index and reports no change of a member."""
    member, agent = round_.members.get(agent_id), state.agents.get(agent_id)
    if announce.index == ANY_INDEX and agent is None:
        return False
    if announce.index != ANY_INDEX and state.agent_ids.get(announce.index, agent_id) != agent_id:
        return False
    if member is None or member.lost:
        return True
    last = announce.membership
    if agent is None or last is None or last.results_ended:
        return False
    known = (member.state, member.ended_stage)
    return last.assignment.round == round_.id and (last.state, last.ended_stage) == known


def _message_may_wait(
    state: CoordinatorState, round_: Round, member: Member, event: AgentMessage, counts: OpenCounts
) -> bool:
    """Return whether a member's message ends nothing: it is neither the first of its kind nor the last one."""
    message, ending = event.message, round_.ending
    about_round = (WorkersFailed, WorkersStopped, WorkersSucceeded, StepReport)
    if isinstance(message, about_round) and message.round != round_.id:
        return not (isinstance(message, WorkersStopped) and not message.has_state)
    plan = ending.planned_stop if ending is not None else None
    stopping = ending is not None and plan is None
    if isinstance(message, WorkersStopped):
        expected = stopping or (plan is not None and plan.last_step is not None)
        return member.accounted_for or (expected and counts.unstopped > 1)
    if isinstance(message, WorkersSucceeded):
        # With Any each success may end the job, also while the round ends.
        all_needed = state.settings.success_policy is SuccessPolicy.ALL
        return all_needed and (stopping or 1 < counts.not_succeeded < len(round_.members))
    if isinstance(message, StepReport):
        if plan is None or plan.last_step is not None:
            return True
        return _misses_steps(round_, plan, event.agent_id, message)
    return stopping or not isinstance(message, (WorkersFailed, NodeResultsEnded, Leaving))


def _misses_steps(round_: Round, plan: PlannedStop, agent_id: str, report: StepReport) -> bool:
    """Return whether the plan goes on after this report, but steps of other members are missing."""
    reported = len(plan.steps) + (agent_id not in plan.steps)
    return report.step is not None and reported < len(round_.members)


_OF_ROUND = (WorkersFailed, WorkersStarted, WorkersStopped, WorkersSucceeded, StageEnded, StepReport)


def needs_no_rules(state: CoordinatorState, event: CoordinatorEvent, counts: OpenCounts) -> bool:
    """Return whether the rules need not run at all for this event: if none applied before it, none applies after it.

    Call this only if `rules_may_wait` holds for the event. It is one of many messages that the members of a large round
    send while it starts, succeeds or ends: none of them is the last that a rule waits for. To run the rules after each
    would cost the square of the number of agents when the messages arrive one after the other.
    """
    round_ = state.round
    if state.recovering_until is not None or state.outcome is not None or state.closed_reason:
        return False
    if round_ is None or not isinstance(event, AgentMessage):
        return False
    message, member = event.message, round_.members.get(event.agent_id)
    if not isinstance(message, _OF_ROUND) or message.round != round_.id or member is None or member.lost:
        return False
    if isinstance(message, (StageEnded, WorkersSucceeded)) and counts.in_stage == 1:
        return False
    if isinstance(message, StageEnded):
        return state.settings.success_policy is SuccessPolicy.ALL
    if round_.ending is None:
        if isinstance(message, WorkersStarted):
            return counts.starting > 1
        return isinstance(message, WorkersSucceeded) and bool(round_.formed_at)
    plan = round_.ending.planned_stop
    if isinstance(message, StepReport):
        return True
    if plan is None:
        return counts.counting != 1
    # A member that has succeeded does not stop: without it, the last one to stop comes before `counts` shows it.
    return isinstance(message, WorkersStopped) and counts.not_succeeded == len(round_.members)
