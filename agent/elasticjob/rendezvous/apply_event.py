"""Events into the state of rounds, without acting on what follows from them. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

from elasticjob.contract.messages import (
    ANY_INDEX,
    Announce,
    Close,
    Closed,
    EndRound,
    Finish,
    Leaving,
    MemberState,
    NewerStore,
    NodeToCoordinator,
    OperatorView,
    Outcome,
    Ready,
    Standby,
    StepReport,
    StepTimes,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import confirmation, planned_end, stalls, store_recovery
from elasticjob.rendezvous.decision import RoundDecision
from elasticjob.rendezvous.round_end import end_message
from elasticjob.rendezvous.state import (
    RECOVERY_TIMEOUT,
    CoordinatorEvent,
    CoordinatorState,
    Member,
    NewerStoreSeen,
    Node,
    NodeDisconnected,
    NodeMessage,
    OperatorViewReceived,
    Round,
    SendToNode,
    Tick,
    expected_pod,
    node_with_same_index,
    set_member,
    set_node,
    superseded,
)


def apply_event(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Take one event into the state, without acting on what follows from it."""
    if state.newer_store is not None:
        return RoundDecision(state)
    if isinstance(event, NewerStoreSeen):
        return _newer_store(state, event.incarnation)
    if isinstance(event, NodeMessage):
        if isinstance(event.message, Announce):
            return _announced(state, event.agent_id, event.message, now)
        if isinstance(event.message, Close):
            return _close(state, event.message)
        node = state.nodes.get(event.agent_id)
        return RoundDecision(state) if node is None else RoundDecision(_said(state, node, event.message, now))
    if isinstance(event, NodeDisconnected):
        node = state.nodes.get(event.agent_id)
        if node is None:
            return RoundDecision(state)
        state = confirmation.record_disconnected_node(state, event.agent_id)
        return RoundDecision(set_node(state, replace(node, disconnected_at=now)), reason=f"link of {node.pod} closed")
    if isinstance(event, OperatorViewReceived):
        return RoundDecision(_informed(state, event.view))
    _: Tick = event
    return RoundDecision(state)


def _newer_store(state: CoordinatorState, incarnation: int) -> RoundDecision:
    """This store was given up: whatever it still knows, another one decides."""
    if incarnation <= state.store_incarnation:
        return RoundDecision(state)
    return RoundDecision(replace(state, newer_store=incarnation), reason=f"closed: store {incarnation} has taken over")


def _announced(state: CoordinatorState, agent_id: str, announce: Announce, now: float) -> RoundDecision:
    node = _node(state, agent_id, announce, now)
    if state.outcome is not None:
        finish = Finish(state.outcome, state.outcome_reason)
        return RoundDecision(set_node(state, node), (SendToNode(agent_id, finish),), f"{node.pod} came after the end")
    other = node_with_same_index(state, node)
    if superseded(state, node) or (other is not None and other.incarnation > node.incarnation):
        finish = Finish(Outcome.SUPERSEDED, "Superseded", f"a newer pod has index {node.index}")
        return RoundDecision(state, (SendToNode(agent_id, finish),), f"{node.pod} is superseded")
    state = _displace(state, other)
    told = RoundDecision(state, (SendToNode(agent_id, Closed(state.closed_reason)),) if state.closed_reason else ())
    if state.recovering_until is not None:
        if not state.nodes:
            state = replace(state, recovering_until=now + RECOVERY_TIMEOUT)
        return told.then(RoundDecision(set_node(state, node), reason=f"{node.pod} announced while recovering"))
    return told.then(_placed(state, node, announce, now))


def _close(state: CoordinatorState, message: Close) -> RoundDecision:
    """Closed stays closed. Where an operator has spoken, it decides when its job ends."""
    if state.closed_reason or state.operator_seen:
        return RoundDecision(state)
    why = message.reason or "by a node's word"
    effects = tuple(SendToNode(agent_id, Closed(why)) for agent_id in state.nodes)
    return RoundDecision(replace(state, closed_reason=why), effects, f"closed: {why}")


def _node(state: CoordinatorState, agent_id: str, a: Announce, now: float) -> Node:
    known = state.nodes.get(agent_id)
    index = a.index if a.index != ANY_INDEX else known.index if known else _free_slot(state, now)
    return Node(
        agent_id=agent_id,
        index=index,
        incarnation=a.incarnation,
        pod=a.pod,
        address=a.address,
        store_port=a.store_port,
        local_world_size=a.local_world_size,
        role=a.role,
        ready=a.ready,
        membership=a.membership,
        leaving=known.leaving if known else "",
        stale_round=known.stale_round if known else None,
        fork_disabled_reason=a.fork_disabled_reason,
    )


def _free_slot(state: CoordinatorState, now: float) -> int:
    taken = {n.index for n in state.nodes.values() if not n.expired(now)}
    return next(index for index in itertools.count() if index not in taken)


def _displace(state: CoordinatorState, other: Node | None) -> CoordinatorState:
    """A index has one node: whoever had it under another agent id is dead to the job."""
    if other is None:
        return state
    nodes = dict(state.nodes)
    del nodes[other.agent_id]
    return replace(state, nodes=nodes)


def _placed(state: CoordinatorState, node: Node, announce: Announce, now: float) -> RoundDecision:
    """Find the place of a node that (re)connects: its part in the current round, a round of the past, or none."""
    member = state.round.members.get(node.agent_id) if state.round else None
    if state.round is not None and member is not None and not member.lost:
        return _back_in_round(state, node, state.round, member, now)
    last = announce.membership
    if last is not None and last.state is not MemberState.STOPPED:
        return stop_stale_round(state, node, last.assignment.round)
    state = set_node(state, replace(node, stale_round=None))
    state = confirmation.record_stopped_node(state, node.agent_id, last.assignment.round) if last is not None else state
    return RoundDecision(state, (SendToNode(node.agent_id, standby_message(state)),), f"{node.pod} announced")


def standby_message(state: CoordinatorState) -> Standby:
    if state.round is None:
        return Standby("waiting for more nodes")
    if state.round.ending is not None:
        return Standby("waiting for the next round")
    if len(state.round.members) >= state.settings.target:
        return Standby("the round is full without this node", redundant=True)
    return Standby("a round runs without this node")


def stop_stale_round(state: CoordinatorState, node: Node, old: RoundId) -> RoundDecision:
    """A node that still runs a round of the past must stop before it may join."""
    end = EndRound(old, state.settings.stop_grace, "the job went on without this node")
    state = set_node(state, replace(node, stale_round=old))
    return RoundDecision(state, (SendToNode(node.agent_id, end),), f"{node.pod} still runs round {old}")


def _back_in_round(state: CoordinatorState, node: Node, round_: Round, member: Member, now: float) -> RoundDecision:
    """The link blipped: what was said in between is repaired from what the node says of itself."""
    state = set_node(state, node)
    last = node.membership
    if last is not None and last.assignment.round == round_.id:
        state = replace(state, round=_with_member_state(round_, node.agent_id, last.state))
        if last.state is MemberState.STOPPED:
            return RoundDecision(state, reason=f"{node.pod} is back")
        if round_.ending is None:
            # Said again: a node that was cut off has frozen its workers and waits for just this.
            return RoundDecision(state, (SendToNode(node.agent_id, member.assignment),), f"{node.pod} is back")
        end = end_message(state, round_, round_.ending)
        return RoundDecision(state, (SendToNode(node.agent_id, end),), f"{node.pod} is back in a round that ends")
    if round_.ending is not None:
        stopped = replace(member, state=MemberState.STOPPED)
        return RoundDecision(
            replace(state, round=set_member(round_, node.agent_id, stopped)), reason=f"{node.pod} is back"
        )
    return RoundDecision(
        state, (SendToNode(node.agent_id, member.assignment),), f"{node.pod} is back and did not hear of its round"
    )


def _with_member_state(round_: Round, agent_id: str, reached: MemberState) -> Round:
    return set_member(round_, agent_id, replace(round_.members[agent_id], state=reached))


def _said(state: CoordinatorState, node: Node, message: NodeToCoordinator, now: float) -> CoordinatorState:
    if isinstance(message, Ready):
        return set_node(state, replace(node, ready=True, fork_disabled_reason=message.fork_disabled_reason))
    if isinstance(message, Leaving):
        if message.failure is not None:
            state = replace(state, unhealthy={**state.unhealthy, node.pod: message.failure})
        return set_node(state, replace(node, leaving=message.reason or "told to go"))
    if isinstance(message, (Announce, Close, NewerStore, StepTimes)):
        return state
    if isinstance(message, StepReport):
        return _reported(state, node, message)
    if isinstance(message, WorkersStalled):
        return stalls.record_stall(state, node, message, now)
    if isinstance(message, WorkersStopped):
        state = confirmation.record_stopped_node(state, node.agent_id, message.round)
        stale = node.stale_round if node.stale_round and node.stale_round > message.round else None
        state = set_node(state, replace(node, store_port=message.store_port, stale_round=stale))
    return _said_of_round(state, node, message, now)


_REACHED = {
    WorkersStarted: MemberState.RUNNING,
    WorkersFailed: MemberState.FAILED,
    WorkersSucceeded: MemberState.SUCCEEDED,
    WorkersStopped: MemberState.STOPPED,
}


_LATER = {
    MemberState.STARTING: 0,
    MemberState.RUNNING: 1,
    MemberState.SUCCEEDED: 2,
    MemberState.FAILED: 2,
    MemberState.STOPPED: 3,
}


def _said_of_round(
    state: CoordinatorState,
    node: Node,
    message: WorkersStarted | WorkersFailed | WorkersSucceeded | WorkersStopped,
    now: float,
) -> CoordinatorState:
    """Only words on the current round, by a member that is not given up, have an effect; states only move forward."""
    round_ = state.round
    if state.recovering_until is not None:
        return set_node(
            state, store_recovery.record_message(state.nodes[node.agent_id], message, _REACHED[type(message)])
        )
    if round_ is None or message.round != round_.id:
        return state
    member = round_.members.get(node.agent_id)
    if member is None or member.lost:
        return state
    if isinstance(message, WorkersFailed):
        round_ = replace(round_, failures=(*round_.failures, message.failure))
    reached = _REACHED[type(message)]
    if _LATER[reached] > _LATER[member.state]:
        round_ = _with_member_state(round_, node.agent_id, reached)
    return replace(state, round=round_)


def _reported(state: CoordinatorState, node: Node, report: StepReport) -> CoordinatorState:
    round_ = state.round
    if round_ is None or report.round != round_.id or node.agent_id not in round_.members:
        return state
    return replace(state, round=planned_end.record_step(round_, node.agent_id, report))


def _informed(state: CoordinatorState, facts: OperatorView) -> CoordinatorState:
    """Take the operator's word, unless it is older than the last (two operators may talk at once)."""
    if (facts.lease, facts.sequence) <= (state.operator_view.lease, state.operator_view.sequence):
        return state
    seen = facts.charged_round
    pods = {p.index: p for p in facts.pods}
    ended = tuple(e for e in state.ended_rounds if seen is None or e.round > seen)
    unfit = {pod: failure for pod, failure in state.unhealthy.items() if any(p.pod == pod for p in facts.pods)}
    state = replace(state, operator_view=facts, operator_seen=True, pods=pods, ended_rounds=ended, unhealthy=unfit)
    state = confirmation.receive_confirmation(state, facts)
    return replace(state, nodes={b: n for b, n in state.nodes.items() if not _forgotten(state, n)})


def _forgotten(state: CoordinatorState, node: Node) -> bool:
    fact = expected_pod(state, node.index)
    gone = fact is None or fact.incarnation > node.incarnation
    return gone and node.disconnected_at is not None and not _undecided(state, node)


def _undecided(state: CoordinatorState, node: Node) -> bool:
    member = state.round.members.get(node.agent_id) if state.round else None
    return member is not None and not member.accounted_for
