"""Events into the state of rounds, without acting on what follows from them. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

from elasticjob.contract.messages import (
    ANY_SLOT,
    Announce,
    Close,
    Closed,
    EndRound,
    Facts,
    Finish,
    FromNode,
    Leaving,
    MemberState,
    NewerStore,
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
from elasticjob.rendezvous.decision import Decision
from elasticjob.rendezvous.round_end import word_of_end
from elasticjob.rendezvous.state import (
    RECOVERY_TIMEOUT,
    Event,
    FactsArrived,
    Member,
    NewerStoreHeard,
    Node,
    NodeGone,
    NodeSaid,
    Round,
    Send,
    State,
    Tick,
    fact_of,
    rival,
    set_member,
    set_node,
    superseded,
)


def observe(state: State, event: Event, now: float) -> Decision:
    """Take one event into the state, without acting on what follows from it."""
    if state.newer_store is not None:
        return Decision(state)
    if isinstance(event, NewerStoreHeard):
        return _newer_store(state, event.incarnation)
    if isinstance(event, NodeSaid):
        if isinstance(event.message, Announce):
            return _announced(state, event.boot, event.message, now)
        if isinstance(event.message, Close):
            return _close(state, event.message)
        node = state.nodes.get(event.boot)
        return Decision(state) if node is None else Decision(_said(state, node, event.message, now))
    if isinstance(event, NodeGone):
        node = state.nodes.get(event.boot)
        if node is None:
            return Decision(state)
        state = confirmation.gone(state, event.boot)
        return Decision(set_node(state, replace(node, gone_at=now)), reason=f"link of {node.pod} closed")
    if isinstance(event, FactsArrived):
        return Decision(_informed(state, event.facts))
    _: Tick = event
    return Decision(state)


def _newer_store(state: State, incarnation: int) -> Decision:
    """This store was given up: whatever it still knows, another one decides."""
    if incarnation <= state.store:
        return Decision(state)
    return Decision(replace(state, newer_store=incarnation), reason=f"closed: store {incarnation} has taken over")


def _announced(state: State, boot: str, announce: Announce, now: float) -> Decision:
    node = _node(state, boot, announce, now)
    if state.outcome is not None:
        finish = Finish(state.outcome, state.outcome_reason)
        return Decision(set_node(state, node), (Send(boot, finish),), f"{node.pod} came after the end")
    other = rival(state, node)
    if superseded(state, node) or (other is not None and other.incarnation > node.incarnation):
        finish = Finish(Outcome.SUPERSEDED, "Superseded", f"a newer pod has slot {node.slot}")
        return Decision(state, (Send(boot, finish),), f"{node.pod} is superseded")
    state = _displace(state, other)
    told = Decision(state, (Send(boot, Closed(state.closed)),) if state.closed else ())
    if state.recovering_until is not None:
        if not state.nodes:
            state = replace(state, recovering_until=now + RECOVERY_TIMEOUT)
        return told.then(Decision(set_node(state, node), reason=f"{node.pod} announced while recovering"))
    return told.then(_placed(state, node, announce, now))


def _close(state: State, message: Close) -> Decision:
    """Closed stays closed. Where an operator has spoken, it decides when its job ends."""
    if state.closed or state.informed:
        return Decision(state)
    why = message.reason or "by a node's word"
    effects = tuple(Send(boot, Closed(why)) for boot in state.nodes)
    return Decision(replace(state, closed=why), effects, f"closed: {why}")


def _node(state: State, boot: str, a: Announce, now: float) -> Node:
    known = state.nodes.get(boot)
    slot = a.slot if a.slot != ANY_SLOT else known.slot if known else _free_slot(state, now)
    return Node(
        boot=boot, slot=slot, incarnation=a.incarnation, pod=a.pod, address=a.address, store_port=a.store_port,
        local_world_size=a.local_world_size, role=a.role, ready=a.ready, membership=a.membership,
        leaving=known.leaving if known else "", stale=known.stale if known else None, warm_off=a.warm_off,
    )  # fmt: skip


def _free_slot(state: State, now: float) -> int:
    taken = {n.slot for n in state.nodes.values() if not n.lost(now)}
    return next(slot for slot in itertools.count() if slot not in taken)


def _displace(state: State, other: Node | None) -> State:
    """A slot has one node: whoever had it under another boot id is dead to the job."""
    if other is None:
        return state
    nodes = dict(state.nodes)
    del nodes[other.boot]
    return replace(state, nodes=nodes)


def _placed(state: State, node: Node, announce: Announce, now: float) -> Decision:
    """Find the place of a node that (re)connects: its part in the current round, a round of the past, or none."""
    member = state.round.members.get(node.boot) if state.round else None
    if state.round is not None and member is not None and not member.lost:
        return _back_in_round(state, node, state.round, member, now)
    last = announce.membership
    if last is not None and last.state is not MemberState.STOPPED:
        return out_of_date(state, node, last.assignment.round)
    state = set_node(state, replace(node, stale=None))
    state = confirmation.stopped(state, node.boot, last.assignment.round) if last is not None else state
    return Decision(state, (Send(node.boot, standby(state)),), f"{node.pod} announced")


def standby(state: State) -> Standby:
    if state.round is None:
        return Standby("waiting for more nodes")
    if state.round.ending is not None:
        return Standby("waiting for the next round")
    if len(state.round.members) >= state.settings.target:
        return Standby("the round is full without this node", redundant=True)
    return Standby("a round runs without this node")


def out_of_date(state: State, node: Node, old: RoundId) -> Decision:
    """A node that still runs a round of the past must stop before it may join."""
    end = EndRound(old, state.settings.stop_grace, "the job went on without this node")
    state = set_node(state, replace(node, stale=old))
    return Decision(state, (Send(node.boot, end),), f"{node.pod} still runs round {old}")


def _back_in_round(state: State, node: Node, round_: Round, member: Member, now: float) -> Decision:
    """The link blipped: what was said in between is repaired from what the node says of itself."""
    state = set_node(state, node)
    last = node.membership
    if last is not None and last.assignment.round == round_.id:
        state = replace(state, round=_with_member_state(round_, node.boot, last.state))
        if last.state is MemberState.STOPPED:
            return Decision(state, reason=f"{node.pod} is back")
        if round_.ending is None:
            # Said again: a node that was cut off has frozen its workers and waits for just this.
            return Decision(state, (Send(node.boot, member.assignment),), f"{node.pod} is back")
        end = word_of_end(state, round_, round_.ending)
        return Decision(state, (Send(node.boot, end),), f"{node.pod} is back in a round that ends")
    if round_.ending is not None:
        stopped = replace(member, state=MemberState.STOPPED)
        return Decision(replace(state, round=set_member(round_, node.boot, stopped)), reason=f"{node.pod} is back")
    return Decision(state, (Send(node.boot, member.assignment),), f"{node.pod} is back and did not hear of its round")


def _with_member_state(round_: Round, boot: str, reached: MemberState) -> Round:
    return set_member(round_, boot, replace(round_.members[boot], state=reached))


def _said(state: State, node: Node, message: FromNode, now: float) -> State:
    if isinstance(message, Ready):
        return set_node(state, replace(node, ready=True, warm_off=message.warm_off))
    if isinstance(message, Leaving):
        if message.failure is not None:
            state = replace(state, unfit={**state.unfit, node.pod: message.failure})
        return set_node(state, replace(node, leaving=message.reason or "told to go"))
    if isinstance(message, (Announce, Close, NewerStore, StepTimes)):
        return state
    if isinstance(message, StepReport):
        return _reported(state, node, message)
    if isinstance(message, WorkersStalled):
        return stalls.heard(state, node, message, now)
    if isinstance(message, WorkersStopped):
        state = confirmation.stopped(state, node.boot, message.round)
        stale = node.stale if node.stale and node.stale > message.round else None
        state = set_node(state, replace(node, store_port=message.store_port, stale=stale))
    return _said_of_round(state, node, message, now)


_REACHED = {
    WorkersStarted: MemberState.RUNNING,
    WorkersFailed: MemberState.FAILED,
    WorkersSucceeded: MemberState.SUCCEEDED,
    WorkersStopped: MemberState.STOPPED,
}


_LATER = {
    MemberState.STARTING: 0, MemberState.RUNNING: 1, MemberState.SUCCEEDED: 2, MemberState.FAILED: 2,
    MemberState.STOPPED: 3,
}  # fmt: skip


def _said_of_round(
    state: State,
    node: Node,
    message: WorkersStarted | WorkersFailed | WorkersSucceeded | WorkersStopped,
    now: float,
) -> State:
    """Only words on the current round, by a member that is not given up, have an effect; states only move forward."""
    round_ = state.round
    if state.recovering_until is not None:
        return set_node(state, store_recovery.said(state.nodes[node.boot], message, _REACHED[type(message)]))
    if round_ is None or message.round != round_.id:
        return state
    member = round_.members.get(node.boot)
    if member is None or member.lost:
        return state
    if isinstance(message, WorkersFailed):
        round_ = replace(round_, failures=(*round_.failures, message.failure))
    reached = _REACHED[type(message)]
    if _LATER[reached] > _LATER[member.state]:
        round_ = _with_member_state(round_, node.boot, reached)
    return replace(state, round=round_)


def _reported(state: State, node: Node, report: StepReport) -> State:
    round_ = state.round
    if round_ is None or report.round != round_.id or node.boot not in round_.members:
        return state
    return replace(state, round=planned_end.reported(round_, node.boot, report))


def _informed(state: State, facts: Facts) -> State:
    """Take the operator's word, unless it is older than the last (two operators may talk at once)."""
    if (facts.lease, facts.sequence) <= (state.facts.lease, state.facts.sequence):
        return state
    seen = facts.charged_round
    pods = {p.slot: p for p in facts.pods}
    ended = tuple(e for e in state.ended if seen is None or e.round > seen)
    unfit = {pod: failure for pod, failure in state.unfit.items() if any(p.pod == pod for p in facts.pods)}
    state = replace(state, facts=facts, informed=True, pods=pods, ended=ended, unfit=unfit)
    state = confirmation.heard(state, facts)
    return replace(state, nodes={b: n for b, n in state.nodes.items() if not _forgotten(state, n)})


def _forgotten(state: State, node: Node) -> bool:
    fact = fact_of(state, node.slot)
    gone = fact is None or fact.incarnation > node.incarnation
    return gone and node.gone_at is not None and not _undecided(state, node)


def _undecided(state: State, node: Node) -> bool:
    member = state.round.members.get(node.boot) if state.round else None
    return member is not None and not member.accounted
