"""The rules of rounds: `decide(state, event, now) -> Decision(state, effects, reason)`. Pure.

`observe` takes an event into the state, `settle` then applies the rules, first match first, until none applies.
The I/O around it is `coordinator`. What each state of a member and each end of a round means: contract.messages.

    Gathering ──form──► Running ──break / make room──► Ending ──conclude──► Gathering
        ▲                  │ succeed                      │ budget used up
    Recovering             ▼                              ▼
                       Finished(Succeeded)            Finished(Failed)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from elasticjob.contract.messages import (
    ANY_SLOT,
    Announce,
    Close,
    Closed,
    EndReason,
    EndRound,
    Facts,
    Failure,
    FailureClass,
    Finish,
    FromNode,
    Leaving,
    MemberState,
    NewerStore,
    Outcome,
    PlanEnd,
    Ready,
    RoundEnded,
    Standby,
    StepReport,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.policy import HANG_GRACE, root_cause
from elasticjob.rendezvous import only_store, planned, ranks, recovery
from elasticjob.rendezvous.state import (
    BLIP_GRACE,
    STOP_TIMEOUT,
    Ending,
    Event,
    FactsArrived,
    Member,
    NewerStoreHeard,
    Node,
    NodeGone,
    NodeSaid,
    Plan,
    Round,
    Send,
    State,
    Tick,
    awaited,
    candidates,
    departing,
    fact_of,
    set_member,
    set_node,
    superseded,
)


@dataclass(frozen=True)
class Decision:
    """What became of an event. `reason` is for people; empty when nothing changed."""

    state: State
    effects: tuple[Send, ...] = ()
    reason: str = ""

    def then(self, other: Decision) -> Decision:
        """This decision followed by one made on its state."""
        reason = "; ".join(r for r in (self.reason, other.reason) if r)
        return Decision(other.state, self.effects + other.effects, reason)


Rule: TypeAlias = Callable[[State, float], "Decision | None"]


def decide(state: State, event: Event, now: float) -> Decision:
    """Take one event in and do what follows from it. `now` is the coordinator's monotonic clock, in seconds."""
    seen = observe(state, event, now)
    return seen.then(settle(seen.state, now))


def settle(state: State, now: float) -> Decision:
    """Apply the rules until none applies; none does in a store that is closed."""
    decision = Decision(_formed(state, now))
    while state.newer_store is None:
        step = next((s for rule in RULES if (s := rule(decision.state, now)) is not None), None)
        if step is None:
            break
        decision = decision.then(step)
    return decision


def _formed(state: State, now: float) -> State:
    """A round is formed once nobody is starting; asked once for all that arrived together, not at each word."""
    round_ = state.round
    if round_ is None or round_.formed_at or round_.ending is not None:
        return state
    if any(m.state is MemberState.STARTING for m in round_.members.values()):
        return state
    return replace(state, round=replace(round_, formed_at=state.epoch + now))


def deadline(state: State, now: float) -> float | None:
    """When the next `Tick` is due if nothing happens before; None: never."""
    if state.newer_store is not None:
        return None
    times = [n.gone_at + BLIP_GRACE for n in state.nodes.values() if n.gone_at is not None]
    if state.outcome is None:
        if state.asked_at is not None:
            times.append(state.asked_at + only_store.WORD_HOLDS)
        times += [t for t in (state.last_call_at, state.recovering_until) if t is not None]
        if state.joiners_since is not None:
            times.append(state.joiners_since + state.settings.scale_up_stabilization)
        if state.round is not None and state.round.ending is not None:
            plan = planned.deadline(state.round, state.settings.graceful_shutdown)
            times.append(plan if plan is not None else _stop_deadline(state, state.round.ending))
    return min((t for t in times if t > now), default=None)


def _undecided(state: State, node: Node) -> bool:
    member = state.round.members.get(node.boot) if state.round else None
    return member is not None and not member.accounted


def _stop_deadline(state: State, ending: Ending) -> float:
    return ending.since + state.settings.stop_grace + STOP_TIMEOUT


# ---- events ----------------------------------------------------------------------------------------------------


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
    others = [n for n in state.nodes.values() if n.slot == node.slot and n.boot != boot]
    if superseded(state, node) or any(n.incarnation > node.incarnation for n in others):
        finish = Finish(Outcome.SUPERSEDED, "Superseded", f"a newer pod has slot {node.slot}")
        return Decision(state, (Send(boot, finish),), f"{node.pod} is superseded")
    state = _displace(state, others)
    told = Decision(state, (Send(boot, Closed(state.closed)),) if state.closed else ())
    if state.recovering_until is not None:
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
        leaving=known.leaving if known else "", stale=known.stale if known else None,
    )  # fmt: skip


def _free_slot(state: State, now: float) -> int:
    taken = {n.slot for n in state.nodes.values() if not n.lost(now)}
    return next(slot for slot in itertools.count() if slot not in taken)


def _displace(state: State, others: Sequence[Node]) -> State:
    """A slot has one node: whoever had it under another boot id is dead to the job."""
    if not others:
        return state
    return replace(state, nodes={b: n for b, n in state.nodes.items() if n not in others})


def _placed(state: State, node: Node, announce: Announce, now: float) -> Decision:
    """Find the place of a node that (re)connects: its part in the current round, a round of the past, or none."""
    member = state.round.members.get(node.boot) if state.round else None
    if state.round is not None and member is not None and not member.lost:
        return _back_in_round(state, node, state.round, member, now)
    last = announce.membership
    if last is not None and last.state is not MemberState.STOPPED:
        return _out_of_date(state, node, last.assignment.round)
    state = set_node(state, replace(node, stale=None))
    return Decision(state, (Send(node.boot, _standby(state)),), f"{node.pod} announced")


def _standby(state: State) -> Standby:
    if state.round is None:
        return Standby("waiting for more nodes")
    if state.round.ending is not None:
        return Standby("waiting for the next round")
    if len(state.round.members) >= state.settings.target:
        return Standby("the round is full without this node", redundant=True)
    return Standby("a round runs without this node")


def _out_of_date(state: State, node: Node, old: RoundId) -> Decision:
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
        end = _word_of_end(state, round_, round_.ending)
        return Decision(state, (Send(node.boot, end),), f"{node.pod} is back in a round that ends")
    if round_.ending is not None:
        stopped = replace(member, state=MemberState.STOPPED)
        return Decision(replace(state, round=set_member(round_, node.boot, stopped)), reason=f"{node.pod} is back")
    return Decision(state, (Send(node.boot, member.assignment),), f"{node.pod} is back and did not hear of its round")


def _with_member_state(round_: Round, boot: str, reached: MemberState) -> Round:
    return set_member(round_, boot, replace(round_.members[boot], state=reached))


def _said(state: State, node: Node, message: FromNode, now: float) -> State:
    if isinstance(message, Ready):
        return set_node(state, replace(node, ready=True))
    if isinstance(message, Leaving):
        if message.failure is not None:
            state = replace(state, unfit={**state.unfit, node.pod: message.failure})
        return set_node(state, replace(node, leaving=message.reason or "told to go"))
    if isinstance(message, (Announce, Close, NewerStore)):
        return state
    if isinstance(message, StepReport):
        return _reported(state, node, message)
    if isinstance(message, WorkersStopped):
        state = only_store.stopped(state, node, message)
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
        return set_node(state, recovery.said(state.nodes[node.boot], message, _REACHED[type(message)]))
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
    return replace(state, round=planned.reported(round_, node.boot, report))


def _informed(state: State, facts: Facts) -> State:
    """Take the operator's word, unless it is older than the last (two operators may talk at once)."""
    if (facts.lease, facts.sequence) <= (state.facts.lease, state.facts.sequence):
        return state
    seen = facts.charged_round
    pods = {p.slot: p for p in facts.pods}
    ended = tuple(e for e in state.ended if seen is None or e.round > seen)
    unfit = {pod: failure for pod, failure in state.unfit.items() if any(p.pod == pod for p in facts.pods)}
    state = replace(state, facts=facts, informed=True, pods=pods, ended=ended, unfit=unfit)
    state = only_store.heard(state, facts)
    return replace(state, nodes={b: n for b, n in state.nodes.items() if not _forgotten(state, n)})


def _forgotten(state: State, node: Node) -> bool:
    fact = fact_of(state, node.slot)
    gone = fact is None or fact.incarnation > node.incarnation
    return gone and node.gone_at is not None and not _undecided(state, node)


# ---- rules -----------------------------------------------------------------------------------------------------


def _dismiss(state: State, now: float) -> Decision | None:
    """Nodes in no round that are about to go, or that no round will take, may go."""
    if state.recovering_until is not None or state.outcome is not None:
        return None
    members = state.round.members if state.round else {}
    outside = [n for n in state.nodes.values() if n.gone_at is None and n.boot not in members]
    going = [n for n in outside if state.closed or departing(state, n)]
    if not going:
        return None
    effects = tuple(Send(n.boot, _farewell(state, n)) for n in going)
    nodes = {b: n for b, n in state.nodes.items() if n not in going}
    return Decision(replace(state, nodes=nodes), effects, f"{_names(n.pod for n in going)} may go")


def _farewell(state: State, node: Node) -> Finish:
    if superseded(state, node):
        return Finish(Outcome.SUPERSEDED, "Superseded", departing(state, node))
    if state.closed:
        return Finish(Outcome.LEFT, "RendezvousClosed", state.closed)
    return Finish(Outcome.LEFT, "NodeLeft", departing(state, node))


def _recover(state: State, now: float) -> Decision | None:
    """A successor store restores the round it finds, ends it, or finds none."""
    verdict = recovery.judge(state, now)
    if verdict is None:
        return None
    state = replace(state, recovering_until=None)
    outsiders = [n for n in state.nodes.values() if verdict.round is None or n.boot not in verdict.round.members]
    decision = Decision(state, reason=verdict.reason)
    for node in outsiders:
        if node.membership is not None and node.membership.state is not MemberState.STOPPED:
            decision = decision.then(_out_of_date(decision.state, node, node.membership.assignment.round))
    if verdict.round is None:
        return replace(decision, state=replace(decision.state, last=recovery.last(decision.state)))
    state = replace(
        decision.state,
        round=verdict.round,
        n=max(state.n, verdict.round.id.n) if verdict.round.id.store == state.store else state.n,
        rounds=state.rounds + 1,
        last_members=tuple(verdict.round.members),
    )
    decision = replace(decision, state=state)
    if verdict.whole:
        told = tuple(Send(boot, member.assignment) for boot, member in verdict.round.members.items())
        return replace(decision, effects=decision.effects + told)
    return decision.then(_end(state, verdict.round, EndReason.AGENT_LOST, verdict.reason, now))


def _lose(state: State, now: float) -> Decision | None:
    """Members whose node is dead, or does not stop, are given up."""
    round_ = state.round
    if round_ is None:
        return None
    stopping = round_.ending is not None and round_.ending.plan is None
    late = stopping and round_.ending is not None and now >= _stop_deadline(state, round_.ending)
    lost = [b for b, m in round_.members.items() if not m.accounted and (late or _dead(state, b, now))]
    if not lost:
        return None
    members = {b: replace(m, lost=True) if b in lost else m for b, m in round_.members.items()}
    state = replace(state, round=replace(round_, members=members))
    for boot in lost:
        if boot in state.nodes:
            state = set_node(state, replace(state.nodes[boot], stale=round_.id))
    return Decision(state, reason=f"{_names(members[b].pod for b in lost)} lost")


def _dead(state: State, boot: str, now: float) -> bool:
    node = state.nodes.get(boot)
    if node is None or node.lost(now):
        return True
    # A closed link of a pod that Kubernetes calls gone needs no grace.
    return node.gone_at is not None and bool(state.informed and departing(state, node))


def _succeed(state: State, now: float) -> Decision | None:
    """Success is declared once every member has reported it."""
    round_ = state.round
    if round_ is None or (round_.ending is not None and round_.ending.plan is None):
        return None
    if not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values()):
        return None
    ended = _ended(state, round_, EndReason.SUCCEEDED, "all workers succeeded", now)
    state = replace(state, round=None, ended=(*state.ended, ended))
    return _declare(state, Outcome.SUCCEEDED, "AllAgentsSucceeded", None)


def _break(state: State, now: float) -> Decision | None:
    """A round that cannot go on as it is ends."""
    round_ = state.round
    if round_ is None or round_.ending is not None:
        return None
    lost = [m.pod for m in round_.members.values() if m.lost]
    if lost:
        return _end(state, round_, EndReason.AGENT_LOST, f"{_names(lost)} lost", now)
    # Told and stopped may arrive together: what was told counts, not only the state it left behind.
    told = {f.pod for f in round_.failures}
    failed = [m.pod for m in round_.members.values() if m.state is MemberState.FAILED or m.pod in told]
    if failed:
        what = "makes no progress" if _hangs(round_) else "failed"
        return _end(state, round_, EndReason.WORKER_FAILED, f"a worker of {_names(failed)} {what}", now)
    going = [state.nodes[b] for b in round_.members if departing(state, state.nodes[b])]
    stopped = [m.pod for m in round_.members.values() if m.state is MemberState.STOPPED]
    if going and not stopped and all(n.slot >= state.settings.target for n in going):
        return _scale_down(state, round_, now)
    if going or stopped:
        names = _names([n.pod for n in going] or stopped)
        return _end(state, round_, EndReason.NODE_LEFT, f"{names} left", now, on_plan=True)
    return None


def _hangs(round_: Round) -> bool:
    return any(f.kind is FailureClass.HANG for f in round_.failures)


def _agree(state: State, now: float) -> Decision | None:
    """A planned end comes to its last step, or does not come about: then everybody stops at once."""
    round_ = state.round
    if round_ is None or round_.ending is None or all(m.accounted for m in round_.members.values()):
        return None
    verdict = planned.judge(round_, state.settings.graceful_shutdown, now)
    if verdict is None:
        return None
    plan = round_.ending.plan if verdict.last_step is not None else None
    plan = plan and replace(plan, last_step=verdict.last_step)
    ending = replace(round_.ending, plan=plan, since=round_.ending.since if plan else now)
    return _tell_end(state, replace(round_, ending=ending), ending, verdict.reason)


def _conclude(state: State, now: float) -> Decision | None:
    """Once nothing of a round runs any more its cause is known: charge it, and go on or give up."""
    round_ = state.round
    if round_ is None or round_.ending is None or not all(m.accounted for m in round_.members.values()):
        return None
    ended = _cause(state, round_, round_.ending, now)
    hang = ended.failure is not None and ended.failure.kind is FailureClass.HANG
    fatal = hang and ended.charged and state.settings.hang_fails_job
    spent = fatal or (ended.charged and state.charged >= state.settings.max_restarts)
    ended = replace(ended, charged=ended.charged and not spent)
    state = replace(state, round=None, joiners_since=None, ended=(*state.ended, ended), last=only_store.ended(round_))
    if spent:
        return _declare(state, Outcome.FAILED, "HangDetected" if fatal else "MaxRestartsExceeded", ended.failure)
    return Decision(state, reason=f"round {round_.id} ended: {ended.message}")


def _cause(state: State, round_: Round, ending: Ending, now: float) -> RoundEnded:
    """The root cause. A broken collective is never one while a member is lost or leaving, or the end was planned;
    nor is what happened on a node that went."""
    lost = tuple(m.pod for m in round_.members.values() if m.lost)
    left = tuple(
        n.pod for b in round_.members if (n := state.nodes.get(b)) and n.pod not in lost and departing(state, n)
    )
    root = root_cause(f for f in round_.failures if f.pod not in lost + left)
    echo = root is not None and root.kind is FailureClass.COLLECTIVE_FAILED
    if root is not None and not (echo and (lost or left or ending.reason is not EndReason.WORKER_FAILED)):
        return _ended(state, round_, EndReason.WORKER_FAILED, _tell(root), now, failure=root)
    if lost or ending.reason is EndReason.AGENT_LOST:
        message = f"{_names(lost)} lost" if lost else ending.message
        return _ended(state, round_, EndReason.AGENT_LOST, message, now, lost=lost)
    if left and ending.reason is not EndReason.SCALING_DOWN:
        unfit = next((state.unfit[pod] for pod in left if pod in state.unfit), None)
        message = f"{unfit.pod} is not fit: {unfit.message}" if unfit else f"{_names(left)} left"
        return _ended(state, round_, EndReason.NODE_LEFT, message, now, failure=unfit, lost=left)
    return _ended(state, round_, ending.reason, ending.message, now)


def _tell(failure: Failure) -> str:
    if failure.kind is FailureClass.HANG:
        return f"rank {failure.rank} in {failure.pod}: {failure.message.partition(chr(10))[0]}"
    what = failure.exception or failure.signal or f"exit code {failure.exit_code}"
    where = failure.pod if failure.rank is None else f"rank {failure.rank} in {failure.pod}"
    return f"{where} failed: {what}"


def _ended(
    state: State,
    round_: Round,
    reason: EndReason,
    message: str,
    now: float,
    *,
    failure: Failure | None = None,
    lost: tuple[str, ...] = (),
) -> RoundEnded:
    charged = reason is EndReason.WORKER_FAILED
    return RoundEnded(round_.id, reason, message, charged, state.epoch + now, round_.world_size, failure, lost)


def _make_room(state: State, now: float) -> Decision | None:
    """A running round ends for a lower target, or for ready joiners; never once a member has succeeded."""
    round_ = state.round
    if round_ is None or round_.ending is not None or not round_.formed_at or state.closed:
        return None
    if any(m.state is MemberState.SUCCEEDED for m in round_.members.values()):
        return None
    room = state.settings.target - len(round_.members)
    if room < 0:
        return _scale_down(state, round_, now)
    joiners = [n for n in _newcomers(state) if n.boot not in round_.members]
    if not joiners or not room:
        return None if state.joiners_since is None else Decision(replace(state, joiners_since=None))
    since = now if state.joiners_since is None else state.joiners_since
    patient = now < since + state.settings.scale_up_stabilization and len(joiners) < room
    if patient and (not state.informed or any(awaited(state, ready=True))):
        return Decision(replace(state, joiners_since=since)) if state.joiners_since is None else None
    message = f"{_names(n.pod for n in joiners[:room])} joins"
    return _end(state, round_, EndReason.SCALING_UP, message, now, on_plan=True)


def _scale_down(state: State, round_: Round, now: float) -> Decision:
    message = f"from {len(round_.members)} nodes to at most {state.settings.target}"
    return _end(state, round_, EndReason.SCALING_DOWN, message, now, on_plan=True)


def _newcomers(state: State) -> list[Node]:
    """Warm nodes that the job wants: one beyond the target is about to be told to go."""
    return [n for n in candidates(state) if n.ready and n.slot < state.settings.target]


def _form(state: State, now: float) -> Decision | None:
    """Close a round as soon as everyone who can come has come; the last call is for what nobody knows about."""
    if state.round is not None or state.outcome is not None or state.recovering_until is not None or state.closed:
        return None
    pool = candidates(state)
    survivors = any(n.boot in state.last_members for n in pool)
    ready = [n for n in pool if n.ready]
    if survivors and len(ready) >= state.settings.min_nodes:
        return _start(state, ready, "with who is left", now)
    if len(pool) < state.settings.min_nodes:
        idle = state.last_call_at is None and state.asked_at is None
        return None if idle else Decision(replace(state, last_call_at=None, asked_at=None))
    if len(pool) >= state.settings.target:
        return _start(state, pool, "everyone is here", now)
    if state.informed and not any(awaited(state, ready=False)):
        return _start(state, pool, "everyone who can come is here", now)
    if state.last_call_at is None:
        return Decision(replace(state, last_call_at=now + state.settings.last_call_timeout), reason="last call")
    return _start(state, pool, "the last call is over", now) if now >= state.last_call_at else None


def _start(state: State, pool: Sequence[Node], why: str, now: float) -> Decision | None:
    if only_store.needs_word(state, now):
        asking = only_store.ask(state, now)
        missing = f"{only_store.missing(state)} of {state.last.size} nodes are missing"
        return None if asking is None else Decision(asking, reason=missing)
    chosen = ranks.choose(pool, state.last_members, state.settings.target)
    round_id = RoundId(state.attempt, state.store, state.n + 1)
    members = ranks.assign(
        chosen,
        round_id,
        restarts=state.charged,
        max_restarts=state.settings.max_restarts,
        progress_timeout=state.settings.progress_timeout,
    )
    state = replace(
        state,
        round=Round(round_id, members),
        n=round_id.n,
        rounds=state.rounds + 1,
        last_members=tuple(members),
        last_call_at=None,
        joiners_since=None,
        asked_at=None,
        word_until=None,
    )
    effects = tuple(Send(boot, member.assignment) for boot, member in members.items())
    effects += tuple(Send(n.boot, _standby(state)) for n in pool if n.boot not in members)
    return Decision(state, effects, f"round {round_id} of {len(members)} nodes: {why}")


def _end(
    state: State, round_: Round, reason: EndReason, message: str, now: float, *, on_plan: bool = False
) -> Decision:
    """Begin a round's end: everybody in it is told at once. On plan they are asked for their steps first."""
    ending = Ending(reason, message, now, on_plan, Plan() if on_plan and planned.possible(round_) else None)
    return _tell_end(
        state, replace(round_, ending=ending), ending, f"round {round_.id} ends ({reason.value}): {message}"
    )


def _tell_end(state: State, round_: Round, ending: Ending, why: str) -> Decision:
    word = _word_of_end(state, round_, ending)
    effects = tuple(Send(b, word) for b, m in round_.members.items() if not m.accounted)
    return Decision(replace(state, round=round_), effects, why)


def _word_of_end(state: State, round_: Round, ending: Ending) -> PlanEnd | EndRound:
    """What a member has to be told now."""
    last_step = ending.plan.last_step if ending.plan else None
    if ending.plan is not None and last_step is None:
        return PlanEnd(round_.id, ending.message)
    hang, grace = _hangs(round_), state.settings.stop_grace
    grace = min(grace, HANG_GRACE) if hang else grace
    return EndRound(round_.id, grace, ending.message, ending.planned, last_step, stacks=hang)


def _declare(state: State, outcome: Outcome, reason: str, failure: Failure | None) -> Decision:
    """The job's end, told to everybody now and to whoever asks later; never undone."""
    state = replace(state, outcome=outcome, outcome_reason=reason, failure=failure)
    message = _tell(failure) if failure else ""
    effects = tuple(Send(boot, Finish(outcome, reason, message)) for boot in state.nodes)
    return Decision(state, effects, f"{outcome.value}: {reason}")


def _names(pods: Iterable[str]) -> str:
    """Pod names for people: a few, then a count."""
    names = list(pods)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


RULES: tuple[Rule, ...] = (_recover, _lose, _succeed, _break, _agree, _conclude, _dismiss, _make_room, _form)
"""In order: what is known to be over is settled before anything new begins."""
