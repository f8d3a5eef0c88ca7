"""After which events of a batch the rules need not run. Pure.

The rules look at every node, so `rounds.decide_together` runs them once for many events that arrived together. What is
charged must not depend on that. So the rules run before and after each event that one of them may answer with the end
of a round, of recovery or of the job, or that changes how the end of a round is read. They wait only after an event
that `may_wait` knows to be none of these, which costs the same in a job of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob.contract.messages import (
    ANY_INDEX,
    Announce,
    Close,
    Leaving,
    MemberState,
    NodeResultsEnded,
    PodState,
    StepReport,
    SuccessPolicy,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.rendezvous.state import (
    RECONNECT_GRACE,
    CoordinatorEvent,
    CoordinatorState,
    Member,
    Node,
    NodeDisconnected,
    NodeMessage,
    PlannedStop,
    Round,
    departure_reason,
)

_NEVER = 2**62


@dataclass(frozen=True)
class OpenCounts:
    """What is still missing until a rule applies. `follow` updates the counts by one event."""

    unstopped: int = 0
    """Members of the round whose workers may run."""
    not_succeeded: int = 0
    """Members of the round whose workers have not succeeded."""
    connected: int = 0
    """Connected nodes; counted during recovery only."""
    wanted: int = _NEVER
    """Connected nodes without which recovery does not end before its time-out."""


def count_open(state: CoordinatorState) -> OpenCounts:
    """Return the counts of a state."""
    if state.recovering_until is not None:
        connected = [n for n in state.nodes.values() if n.disconnected_at is None]
        sizes = [n.membership.assignment.group_world_size for n in connected if n.membership is not None]
        if state.operator_seen:
            sizes.append(sum(p.state is PodState.RUNNING for p in state.pods.values()))
        return OpenCounts(connected=len(connected), wanted=min(sizes, default=_NEVER))
    members = state.round.members.values() if state.round else ()
    return OpenCounts(
        unstopped=sum(not m.accounted_for for m in members),
        not_succeeded=sum(m.state is not MemberState.SUCCEEDED for m in members),
    )


def follow(counts: OpenCounts, before: CoordinatorState, after: CoordinatorState, agent_id: str) -> OpenCounts:
    """Return the counts after an event of this node."""
    if after.recovering_until is not None:
        old, new = before.nodes.get(agent_id), after.nodes.get(agent_id)
        size = new.membership.assignment.group_world_size if new and new.membership else counts.wanted
        connected = counts.connected + _is_connected(new) - _is_connected(old)
        return replace(counts, connected=connected, wanted=min(counts.wanted, size))
    was, now = _member(before, agent_id), _member(after, agent_id)
    if was is None or now is None or was is now:
        return counts
    succeeded = (now.state is MemberState.SUCCEEDED) - (was.state is MemberState.SUCCEEDED)
    return replace(
        counts,
        unstopped=counts.unstopped + was.accounted_for - now.accounted_for,
        not_succeeded=counts.not_succeeded - succeeded,
    )


def _is_connected(node: Node | None) -> bool:
    return node is not None and node.disconnected_at is None


def _member(state: CoordinatorState, agent_id: str) -> Member | None:
    return state.round.members.get(agent_id) if state.round else None


def may_wait(state: CoordinatorState, event: CoordinatorEvent, counts: OpenCounts, now: float) -> bool:
    """Return whether the rules need not run before and after this event, which comes next."""
    if not isinstance(event, (NodeMessage, NodeDisconnected)):
        return False
    if state.recovering_until is not None:
        return _recovery_may_wait(state, event, counts, now)
    if isinstance(event, NodeMessage) and isinstance(event.message, Close):
        return bool(state.closed_reason or state.operator_seen)
    round_ = state.round
    if round_ is None or state.outcome is not None:
        return True
    if isinstance(event, NodeMessage) and isinstance(event.message, Announce):
        return _announcement_may_wait(state, round_, event.agent_id, event.message)
    member, node = round_.members.get(event.agent_id), state.nodes.get(event.agent_id)
    if node is None:
        return True
    if member is None or member.lost:
        # A node that joins may end a running round; one that does not join any more must not prevent that.
        gone = isinstance(event, NodeDisconnected) or isinstance(event.message, Leaving)
        return round_.ending is not None or not gone
    if isinstance(event, NodeDisconnected):
        return member.accounted_for or not departure_reason(state, node)
    return node.disconnected_at is None and _message_may_wait(state, round_, member, event, counts)


def _recovery_may_wait(
    state: CoordinatorState, event: NodeMessage | NodeDisconnected, counts: OpenCounts, now: float
) -> bool:
    """Return whether recovery goes on after this event, because too few nodes are connected."""
    wanted = counts.wanted
    deadline = state.announced_at + RECONNECT_GRACE if state.took_over else state.recovering_until
    due = deadline is not None and now >= deadline and bool(state.nodes)
    if isinstance(event, NodeMessage) and isinstance(event.message, Announce) and event.message.membership is not None:
        wanted = min(wanted, event.message.membership.assignment.group_world_size)
    if state.passive:
        # A standby store takes over with more than half of a round. The end of recovery is decided after that.
        return 2 * (counts.connected + 1) <= wanted
    return not due and counts.connected + 1 < wanted


def _announcement_may_wait(state: CoordinatorState, round_: Round, agent_id: str, announce: Announce) -> bool:
    """Return whether a node that connects neither takes another node's index nor reports a change of a member."""
    member, node = round_.members.get(agent_id), state.nodes.get(agent_id)
    if announce.index == ANY_INDEX and node is None:
        return False
    if announce.index != ANY_INDEX and state.agent_ids.get(announce.index, agent_id) != agent_id:
        return False
    if member is None or member.lost:
        return True
    last = announce.membership
    return node is not None and last is not None and last.assignment.round == round_.id and last.state is member.state


def _message_may_wait(
    state: CoordinatorState, round_: Round, member: Member, event: NodeMessage, counts: OpenCounts
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
        collecting = plan is not None and plan.last_step is None
        return not (plan and collecting) or _misses_steps(round_, plan, event.agent_id, message)
    return stopping or not isinstance(message, (WorkersFailed, NodeResultsEnded, Leaving))


def _misses_steps(round_: Round, plan: PlannedStop, agent_id: str, report: StepReport) -> bool:
    """Return whether the plan goes on after this report, but steps of other members are missing."""
    reported = len(plan.steps) + (agent_id not in plan.steps)
    return report.step is not None and reported < len(round_.members)
