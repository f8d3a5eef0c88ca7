"""How one event changes the state, and the direct answers to it. `rounds` then applies the rules. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    ANY_INDEX,
    NO_STANDBY_STORE,
    Announce,
    Close,
    Closed,
    EndRound,
    Finish,
    Leaving,
    MemberState,
    NewerStore,
    NodeResultsEnded,
    NodeToCoordinator,
    OperatorView,
    Outcome,
    QueryClosed,
    Ready,
    Standby,
    StartRound,
    StateReceived,
    StepReport,
    StepTimes,
    StoreActive,
    TrainingProgress,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import BEFORE_ROUNDS, RoundId
from elasticjob._runtime.rendezvous import node_ends, store_recovery
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.observations import stalls
from elasticjob._runtime.rendezvous.persistent_map import with_item
from elasticjob._runtime.rendezvous.rounds import confirmation, planned_end, restart_delay
from elasticjob._runtime.rendezvous.rounds.round_end import end_message
from elasticjob._runtime.rendezvous.state import (
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
    is_restartable,
    node_with_same_index,
    set_member,
    set_node,
    superseded,
)


def apply_event(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Return the state with one event applied, and the direct answers to it. A closed store ignores all events."""
    if state.newer_store is not None:
        return RoundDecision(state)
    if isinstance(event, NewerStoreSeen):
        return _apply_newer_store(state, event.incarnation)
    if state.passive:
        return _apply_to_standby_store(state, event, now)
    if isinstance(event, NodeMessage):
        if isinstance(event.message, Announce):
            announced = announce_node(state, _announced_node(state, event.agent_id, event.message, now), now)
            return _with_machine_end(_with_messages_about_stores(announced, event.agent_id), event.agent_id, now)
        if isinstance(event.message, Close):
            return _apply_close(state, event.agent_id, event.message)
        if isinstance(event.message, QueryClosed):
            return RoundDecision(state, _answer_visitor(state, event.agent_id))
        node = state.nodes.get(event.agent_id)
        if node is None:
            return RoundDecision(state)
        after = _apply_node_message(state, node, event.message, now)
        found_restartable = after.nodes[event.agent_id].restartable and not node.restartable
        if found_restartable:
            return _stand_by_outside(after)
        stopped_late = isinstance(event.message, WorkersStopped) and _waits_with_starts(after, event.agent_id)
        return stand_by(after, [after.nodes[event.agent_id]]) if stopped_late else RoundDecision(after)
    if isinstance(event, NodeDisconnected):
        node = state.nodes.get(event.agent_id)
        if node is None:
            return RoundDecision(state)
        state = confirmation.record_disconnected_node(state, event.agent_id)
        return RoundDecision(set_node(state, replace(node, disconnected_at=now)), reason=f"{node.pod} disconnected")
    if isinstance(event, OperatorViewReceived):
        after = restart_delay.delay_after_view(state, _apply_operator_view(state, event.view, now), now)
        ends = node_ends.changed_ends(state, after, now)
        return RoundDecision(after, (*_changed_standby_store(state, after), *ends))
    _: Tick = event
    return RoundDecision(state)


def _apply_to_standby_store(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Record an event at a passive standby store. A node that disconnects has returned to the present store."""
    if isinstance(event, OperatorViewReceived):
        state = _apply_operator_view(state, event.view, now)
        return RoundDecision(replace(state, retired=state.operator_view.retired and not state.restarted))
    if isinstance(event, NodeDisconnected):
        nodes = {agent_id: n for agent_id, n in state.nodes.items() if agent_id != event.agent_id}
        rounds = {n.membership.assignment.round for n in nodes.values() if n.membership is not None}
        failures = {r: f for r, f in state.recovery_failures.items() if r in rounds}
        return RoundDecision(replace(state, nodes=nodes, recovery_failures=failures))
    if not isinstance(event, NodeMessage) or isinstance(event.message, (Close, QueryClosed)):
        return RoundDecision(state)
    if isinstance(event.message, Announce):
        node = _announced_node(state, event.agent_id, event.message, now)
        return RoundDecision(set_node(state, node), reason=f"{node.pod} announced itself at this standby store")
    known = state.nodes.get(event.agent_id)
    return RoundDecision(state if known is None else _apply_node_message(state, known, event.message, now))


def _with_messages_about_stores(decision: RoundDecision, agent_id: str) -> RoundDecision:
    """Return the decision with what a node that has announced itself must know about this store and the next one.

    When the node connected, this store may still have been passive.
    """
    active = (SendToNode(agent_id, StoreActive()),) if decision.state.took_over else ()
    standby = decision.state.operator_view.standby_store
    stays = agent_id in decision.state.nodes
    address = (SendToNode(agent_id, standby),) if standby is not None and stays else ()
    return replace(decision, effects=(*active, *decision.effects, *address))


def _with_machine_end(decision: RoundDecision, agent_id: str, now: float) -> RoundDecision:
    """Return the decision with the end of the machine of a node that has announced itself, if it is known."""
    node = decision.state.nodes.get(agent_id)
    ends = node_ends.known_ends(decision.state, [node] if node is not None else [], now)
    return replace(decision, effects=(*decision.effects, *ends))


def _changed_standby_store(before: CoordinatorState, after: CoordinatorState) -> tuple[SendToNode, ...]:
    """Return the messages to all connected nodes after the standby store has changed."""
    standby = after.operator_view.standby_store or NO_STANDBY_STORE
    if standby == (before.operator_view.standby_store or NO_STANDBY_STORE):
        return ()
    return tuple(SendToNode(n.agent_id, standby) for n in after.nodes.values() if n.disconnected_at is None)


def _apply_newer_store(state: CoordinatorState, incarnation: int) -> RoundDecision:
    """Close this store: the operator has replaced it."""
    if incarnation <= state.store_incarnation:
        return RoundDecision(state)
    reason = f"store closed: store {incarnation} has taken over"
    return RoundDecision(replace(state, newer_store=incarnation), reason=reason)


def announce_node(state: CoordinatorState, node: Node, now: float) -> RoundDecision:
    """Return the state with a node that has announced itself, and the answer to it."""
    agent_id = node.agent_id
    if state.outcome is not None:
        finish = Finish(state.outcome, state.outcome_reason)
        reason = f"{node.pod} announced itself after the end of the job"
        return RoundDecision(set_node(state, node), (SendToNode(agent_id, finish),), reason)
    other = node_with_same_index(state, node)
    if superseded(state, node) and not _must_stop(state, node):
        finish = Finish(Outcome.SUPERSEDED, "Superseded", f"a newer pod has index {node.index}")
        reason = f"{node.pod} is superseded: a newer pod has index {node.index}"
        return RoundDecision(state, (SendToNode(agent_id, finish),), reason)
    closed = (SendToNode(agent_id, Closed(state.closed_reason)),) if state.closed_reason else ()
    displaced = other if other is not None and not _stays(state, other, node) else None
    state = _remove_node(state, displaced)
    answer = RoundDecision(state, (*_displaced(displaced), *closed))
    if state.recovering_until is not None:
        if not state.nodes:
            state = replace(state, recovering_until=now + RECOVERY_TIMEOUT)
        state = replace(state, announced_at=now) if state.took_over else state
        return answer.then(RoundDecision(set_node(state, node), reason=f"{node.pod} announced itself during recovery"))
    return answer.then(_connect_node(state, node, now))


def _stays(state: CoordinatorState, other: Node, node: Node) -> bool:
    """Return whether `other` stays beside `node`, which announces the same index.

    A newer node does. So does an older one that still has workers: its pod is being deleted, and they have time to
    save. The round, and so the next one, waits for it as for every member that leaves.
    """
    newer = other.incarnation > node.incarnation
    return newer or (other.incarnation < node.incarnation and _must_stop(state, other))


def _must_stop(state: CoordinatorState, node: Node) -> bool:
    """Return whether the node has workers of the present round, or of the one that this store may find."""
    if state.recovering_until is None:
        return _may_run_workers(state, node)
    return node.membership is not None and node.membership.state is not MemberState.STOPPED


def _displaced(node: Node | None) -> tuple[SendToNode, ...]:
    """Return the last message to a node whose index another one has taken: without it, the node would wait forever."""
    if node is None or node.disconnected_at is not None:
        return ()
    why = f"another agent has announced itself with index {node.index}"
    return (SendToNode(node.agent_id, Finish(Outcome.SUPERSEDED, "Superseded", why)),)


def _apply_close(state: CoordinatorState, agent_id: str, message: Close) -> RoundDecision:
    """Close the rendezvous for good. Once an operator has connected, only it decides when the job ends."""
    if state.closed_reason or state.operator_seen:
        return RoundDecision(state, _answer_visitor(state, agent_id))
    reason = message.reason or "a node closed it"
    effects = tuple(SendToNode(node, Closed(reason)) for node in state.nodes)
    state = replace(state, closed_reason=reason)
    return RoundDecision(state, effects + _answer_visitor(state, agent_id), f"rendezvous closed: {reason}")


def _answer_visitor(state: CoordinatorState, agent_id: str) -> tuple[SendToNode, ...]:
    """Return the answer to a sender that is no node: nodes are sent `Closed` anyway."""
    if agent_id in state.nodes:
        return ()
    reason = state.closed_reason or state.outcome_reason
    return (SendToNode(agent_id, Closed(reason) if reason else standby_message(state, None)),)


def _announced_node(state: CoordinatorState, agent_id: str, announce: Announce, now: float) -> Node:
    """Return the node that an `Announce` describes, with what this store knows of it from earlier connections."""
    known = state.nodes.get(agent_id)
    index = announce.index
    if index == ANY_INDEX:
        index = known.index if known else _lowest_free_index(state, now)
    node = Node(
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
    return _with_ended_results(state, node, last.assignment.round) if last and last.results_ended else node


def _with_ended_results(state: CoordinatorState, node: Node, round_id: RoundId) -> Node:
    """Return a node that counts no step of a round any more; note whether it says so in time."""
    member = state.round.members.get(node.agent_id) if state.round and state.round.id == round_id else None
    in_time = member is not None and not member.lost
    return replace(node, results_ended=round_id, ended_in_time=round_id if in_time else node.ended_in_time)


def _lowest_free_index(state: CoordinatorState, now: float) -> int:
    taken = {n.index for n in state.nodes.values() if not n.expired(now)}
    return next(index for index in itertools.count() if index not in taken)


def _remove_node(state: CoordinatorState, node: Node | None) -> CoordinatorState:
    if node is None:
        return state
    nodes = dict(state.nodes)
    del nodes[node.agent_id]
    return replace(state, nodes=nodes)


def _connect_node(state: CoordinatorState, node: Node, now: float) -> RoundDecision:
    """Add a node that (re)connects: as a member of the current round, in an older round that it must stop, or idle."""
    member = state.round.members.get(node.agent_id) if state.round else None
    if state.round is not None and member is not None and not member.lost:
        return _reconnect_member(state, node, state.round, member, now)
    last = node.membership
    if last is not None and last.state is not MemberState.STOPPED:
        return stop_stale_round(state, node, last.assignment.round)
    state = set_node(state, replace(node, stale_round=None))
    state = confirmation.record_stopped_node(state, node.agent_id, last.assignment.round if last else None)
    return replace(stand_by(state, [state.nodes[node.agent_id]]), reason=f"{node.pod} announced itself")


def standby_message(state: CoordinatorState, node: Node | None) -> Standby:
    """Return the message for a connected node that is in no round; None: for a visitor."""
    if state.round is None:
        return Standby("waiting for more nodes")
    provisional = _provisional_start(state, state.round, node) if node is not None else None
    if state.round.ending is not None:
        return Standby("waiting for the next round", provisional=provisional)
    if provisional is not None and node is not None and node.new_processes.count:
        reason = "a round runs without this node until its new processes are at their function"
        return Standby(reason, provisional=provisional)
    if len(state.round.members) >= state.settings.target:
        return Standby("the round is full without this node", redundant=True, provisional=provisional)
    return Standby("a round runs without this node", provisional=provisional)


def stand_by(state: CoordinatorState, nodes: Iterable[Node]) -> RoundDecision:
    """Send connected nodes outside the round what they wait for.

    One that has to start processes begins with it, and is not ready until these wait at their function (`Ready`).
    """
    effects = []
    for node in nodes:
        message = standby_message(state, node)
        effects.append(SendToNode(node.agent_id, message))
        if message.provisional is not None and node.new_processes.count:
            state = set_node(state, replace(node, ready=False, new_processes=replace(node.new_processes, count=0)))
    return RoundDecision(state, tuple(effects))


def _stand_by_outside(state: CoordinatorState) -> RoundDecision:
    members = state.round.members if state.round else {}
    return stand_by(state, [n for n in state.nodes.values() if n.disconnected_at is None and n.agent_id not in members])


def _waits_with_starts(state: CoordinatorState, agent_id: str) -> bool:
    """Return whether a node outside the running round has to start processes and has not begun."""
    node = state.nodes[agent_id]
    outside = state.round is not None and agent_id not in state.round.members
    return outside and node.ready and node.new_processes.count > 0


def _provisional_start(state: CoordinatorState, round_: Round, node: Node) -> StartRound | None:
    """Return `Standby.provisional`; None unless the function of this job can be called again."""
    if not is_restartable(state):
        return None
    members = [n for agent_id in round_.members if (n := state.nodes.get(agent_id))]
    own, other = node.local_world_size, next(iter(round_.members.values())).assignment
    role_size = sum(member.local_world_size for member in members if member.role == node.role)
    return replace(
        other,
        round=BEFORE_ROUNDS,
        group_rank=other.group_world_size,
        group_world_size=other.group_world_size + 1,
        rank=other.world_size,
        world_size=other.world_size + own,
        role_rank=role_size,
        role_world_size=role_size + own,
        master_addr="",
        master_port=0,
        member_addresses=(),
    )


def stop_stale_round(state: CoordinatorState, node: Node, stale_round: RoundId) -> RoundDecision:
    """Send a node that still runs an older round the end of it: until it has stopped, it cannot join a round."""
    end = EndRound(stale_round, state.settings.stop_grace, "the job went on without this node")
    state = set_node(state, replace(node, stale_round=stale_round))
    return RoundDecision(state, (SendToNode(node.agent_id, end),), f"{node.pod} still runs round {stale_round}")


def _reconnect_member(state: CoordinatorState, node: Node, round_: Round, member: Member, now: float) -> RoundDecision:
    """Update a member from what its node announces, and send again what it may have missed."""
    state = set_node(state, node)
    last = node.membership
    if last is not None and last.assignment.round == round_.id:
        state = replace(state, round=_with_member_state(round_, node.agent_id, last.state))
        if last.state is MemberState.STOPPED:
            return RoundDecision(state, reason=f"{node.pod} reconnected")
        if round_.ending is None:
            # A node that was cut off has frozen its workers. The assignment, sent again, lets it resume them.
            return RoundDecision(state, (SendToNode(node.agent_id, member.assignment),), f"{node.pod} reconnected")
        end = end_message(state, round_, round_.ending, now)
        reason = f"{node.pod} reconnected while its round ends"
        return RoundDecision(state, (SendToNode(node.agent_id, end),), reason)
    if round_.ending is not None:
        stopped = replace(member, state=MemberState.STOPPED)
        state = replace(state, round=set_member(round_, node.agent_id, stopped))
        return RoundDecision(state, reason=f"{node.pod} reconnected without having started its round")
    reason = f"{node.pod} reconnected without having received its assignment"
    return RoundDecision(state, (SendToNode(node.agent_id, member.assignment),), reason)


def _with_member_state(round_: Round, agent_id: str, reached: MemberState) -> Round:
    return set_member(round_, agent_id, replace(round_.members[agent_id], state=reached))


def _apply_node_message(
    state: CoordinatorState, node: Node, message: NodeToCoordinator, now: float
) -> CoordinatorState:
    if isinstance(message, Ready):
        node = replace(
            node,
            ready=True,
            fork_disabled_reason=message.fork_disabled_reason,
            restartable=message.restartable,
            hang_guard=message.hang_guard,
            new_processes=replace(node.new_processes, count=0),
        )
        return set_node(state, node)
    if isinstance(message, Leaving):
        if message.failure is not None:
            state = replace(state, unhealthy={**state.unhealthy, node.pod: message.failure})
        return set_node(state, replace(node, leaving_reason=message.reason or "the node asked to leave"))
    if isinstance(message, (Announce, Close, NewerStore, QueryClosed, StepTimes, TrainingProgress, StateReceived)):
        return state
    if isinstance(message, StepReport):
        return _apply_step_report(state, node, message)
    if isinstance(message, NodeResultsEnded):
        return set_node(state, _with_ended_results(state, node, message.round))
    if isinstance(message, WorkersStalled):
        return stalls.record_stall(state, node, message, now)
    if isinstance(message, WorkersStopped):
        stale = node.stale_round if node.stale_round and node.stale_round > message.round else None
        announced = node.membership.assignment.round if node.membership else message.round
        if stale is None and message.round >= announced:
            state = confirmation.record_stopped_node(state, node.agent_id, message.round)
        unresponsive = node.unresponsive and stale is not None
        node = replace(
            node,
            store_port=message.store_port,
            stale_round=stale,
            results_ended=None,
            unresponsive=unresponsive,
            has_state=message.has_state,
            new_processes=message.new_processes,
        )
        state = set_node(state, node)
    return _apply_worker_state(state, node, message)


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


def _apply_worker_state(
    state: CoordinatorState,
    node: Node,
    message: WorkersStarted | WorkersFailed | WorkersSucceeded | WorkersStopped,
) -> CoordinatorState:
    """Apply a message about workers of the current round from a member that is not lost; ignore all others.

    States of members only move forward. During recovery the message updates what the node announced.
    """
    round_ = state.round
    if state.recovering_until is not None:
        return store_recovery.record_message(state, state.nodes[node.agent_id], message, _REACHED[type(message)])
    if round_ is None or message.round != round_.id:
        return state
    member = round_.members.get(node.agent_id)
    if member is None or member.lost:
        return state
    members, failures, ended_ranks = round_.members, round_.failures, round_.ended_ranks
    if isinstance(message, WorkersFailed):
        failures = (*failures, message.failure)
    reached = _REACHED[type(message)]
    if _STATE_ORDER[reached] > _STATE_ORDER[member.state]:
        members = with_item(members, node.agent_id, replace(member, state=reached))
    if isinstance(message, WorkersStopped) and message.ended_ranks:
        ended_ranks = (*ended_ranks, message.ended_ranks)
    return replace(state, round=replace(round_, members=members, failures=failures, ended_ranks=ended_ranks))


def _apply_step_report(state: CoordinatorState, node: Node, report: StepReport) -> CoordinatorState:
    round_ = state.round
    if round_ is None or report.round != round_.id or node.agent_id not in round_.members:
        return state
    return replace(state, round=planned_end.record_step(round_, node.agent_id, report))


def _apply_operator_view(state: CoordinatorState, view: OperatorView, now: float) -> CoordinatorState:
    """Apply the operator's view, unless it is older than the last one: two operators may be connected at once."""
    if (view.lease, view.sequence) <= (state.operator_view.lease, state.operator_view.sequence):
        return state
    seen = view.charged_round
    pods = {p.index: p for p in view.pods}
    ended = tuple(e for e in state.ended_rounds if seen is None or e.round > seen)
    names = {p.pod for p in view.pods}
    unhealthy = {pod: failure for pod, failure in state.unhealthy.items() if pod in names}
    state = replace(state, operator_view=view, operator_seen=True, pods=pods, ended_rounds=ended, unhealthy=unhealthy)
    state = replace(state, replaced={pod: why for pod, why in state.replaced.items() if pod in names})
    if view.newest_round is not None and (state.known_round is None or view.newest_round > state.known_round):
        state = replace(state, known_round=view.newest_round)
    state = node_ends.receive_ends(confirmation.receive_confirmation(state, view), view, now)
    return replace(state, nodes={a: n for a, n in state.nodes.items() if not _is_obsolete(state, n)})


def _is_obsolete(state: CoordinatorState, node: Node) -> bool:
    """Return whether a disconnected node has no pod any more and no part in the current round."""
    pod = expected_pod(state, node.index)
    has_no_pod = pod is None or pod.incarnation > node.incarnation
    return has_no_pod and node.disconnected_at is not None and not _may_run_workers(state, node)


def _may_run_workers(state: CoordinatorState, node: Node) -> bool:
    member = state.round.members.get(node.agent_id) if state.round else None
    return member is not None and not member.accounted_for
