"""The rules of rounds: `decide(state, event, now) -> Decision(state, effects, reason)`. Pure.

`events.observe` takes an event into the state, `settle` then applies the rules, first match first, until none applies.
Rules about the end of a round are in `ending`. The I/O around it is `coordinator`. What each state of a member and each
end of a round means: contract.messages.

    Gathering ──form──► Running ──break / make room──► Ending ──conclude──► Gathering
        ▲                  │ succeed                      │ budget used up
    Recovering             ▼                              ▼
                       Finished(Succeeded)            Finished(Failed)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from elasticjob.contract.messages import (
    EndReason,
    Finish,
    HangAction,
    MemberState,
    Outcome,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import confirmation, planned_end, rank_assignment, stalls, store_recovery
from elasticjob.rendezvous.apply_event import apply_event, standby_message, stop_stale_round
from elasticjob.rendezvous.decision import RoundDecision, Rule, join_reasons, pod_names
from elasticjob.rendezvous.round_end import (
    adopt_outcome,
    advance_planned_end,
    begin_end,
    begin_scale_down,
    conclude_round,
    declare_success,
    end_broken_round,
    expire_lost_nodes,
    stop_deadline,
)
from elasticjob.rendezvous.state import (
    RECONNECT_GRACE,
    CoordinatorEvent,
    CoordinatorState,
    Node,
    Round,
    SendToNode,
    candidates,
    departure_reason,
    missing_pods,
    superseded,
)


def decide(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Take one event in and do what follows from it. `now` is the coordinator's monotonic clock, in seconds."""
    return decide_together(state, (event,), now)


def decide_together(state: CoordinatorState, events: Iterable[CoordinatorEvent], now: float) -> RoundDecision:
    """Take in events that arrived together, in order, then do what follows from them all."""
    effects: list[SendToNode] = []
    reasons: list[str] = []
    for event in events:
        seen = apply_event(state, event, now)
        state = seen.state
        effects += seen.effects
        reasons += [seen.reason] if seen.reason else []
    return RoundDecision(state, tuple(effects), join_reasons(reasons)).then(apply_rules(state, now))


def apply_rules(state: CoordinatorState, now: float) -> RoundDecision:
    """Apply the rules until none applies; none does in a store that is closed."""
    decision = RoundDecision(_formed(state, now))
    while state.newer_store is None:
        step = next((s for rule in RULES if (s := rule(decision.state, now)) is not None), None)
        if step is None:
            break
        decision = decision.then(step)
    return decision


def _formed(state: CoordinatorState, now: float) -> CoordinatorState:
    """A round is formed once nobody is starting; asked once for all that arrived together, not at each word."""
    round_ = state.round
    if round_ is None or round_.formed_at or round_.ending is not None:
        return state
    if any(m.state is MemberState.STARTING for m in round_.members.values()):
        return state
    return replace(state, round=replace(round_, formed_at=state.epoch + now))


def next_deadline(state: CoordinatorState, now: float) -> float | None:
    """When the next `Tick` is due if nothing happens before; None: never."""
    if state.newer_store is not None:
        return None
    times = [n.disconnected_at + RECONNECT_GRACE for n in state.nodes.values() if n.disconnected_at is not None]
    if state.outcome is None:
        if state.confirmation_requested_at is not None:
            times.append(state.confirmation_requested_at + confirmation.CONFIRMATION_SECONDS)
        waits = (
            state.last_call_at,
            state.recovering_until,
            store_recovery.lost_node_deadline(state),
            stalls.stall_deadline(state),
        )
        times += [t for t in waits if t is not None]
        if state.joiners_since is not None:
            times.append(state.joiners_since + state.settings.scale_up_stabilization)
        if state.round is not None and state.round.ending is not None:
            plan = planned_end.planned_end_deadline(state.round, state.settings.graceful_shutdown)
            times.append(plan if plan is not None else stop_deadline(state, state.round.ending))
    return min((t for t in times if t > now), default=None)


def _dismiss(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Nodes in no round that are about to go, or that no round will take, may go."""
    if state.recovering_until is not None or state.outcome is not None:
        return None
    members = state.round.members.keys() if state.round else ()
    outside = [n for n in state.nodes.values() if n.disconnected_at is None and n.agent_id not in members]
    going = [n for n in outside if state.closed_reason or departure_reason(state, n)]
    if not going:
        return None
    effects = tuple(SendToNode(n.agent_id, _farewell(state, n)) for n in going)
    told = {n.agent_id for n in going}
    nodes = {b: n for b, n in state.nodes.items() if b not in told}
    return RoundDecision(replace(state, nodes=nodes), effects, f"{pod_names(n.pod for n in going)} may go")


def _farewell(state: CoordinatorState, node: Node) -> Finish:
    if superseded(state, node):
        return Finish(Outcome.SUPERSEDED, "Superseded", departure_reason(state, node))
    if state.closed_reason:
        return Finish(Outcome.LEFT, "RendezvousClosed", state.closed_reason)
    return Finish(Outcome.LEFT, "NodeLeft", departure_reason(state, node))


def _recover(state: CoordinatorState, now: float) -> RoundDecision | None:
    """A successor store restores the round it finds, ends it, or finds none."""
    verdict = store_recovery.evaluate_recovery(state, now)
    if verdict is None:
        return None
    state = replace(state, recovering_until=None)
    outsiders = [n for n in state.nodes.values() if verdict.round is None or n.agent_id not in verdict.round.members]
    decision = RoundDecision(state, reason=verdict.reason)
    for node in outsiders:
        if node.membership is not None and node.membership.state is not MemberState.STOPPED:
            decision = decision.then(stop_stale_round(decision.state, node, node.membership.assignment.round))
    if verdict.round is None:
        return replace(decision, state=store_recovery.with_last_round(decision.state))
    state = replace(
        decision.state,
        round=verdict.round,
        round_number=max(state.round_number, verdict.round.id.number)
        if verdict.round.id.store_incarnation == state.store_incarnation
        else state.round_number,
        rounds=state.rounds + 1,
        last_members=tuple(verdict.round.members),
    )
    decision = replace(decision, state=state)
    if verdict.whole:
        told = tuple(SendToNode(agent_id, member.assignment) for agent_id, member in verdict.round.members.items())
        return replace(decision, effects=decision.effects + told)
    return decision.then(begin_end(state, verdict.round, EndReason.AGENT_LOST, verdict.reason, now))


def _make_room(state: CoordinatorState, now: float) -> RoundDecision | None:
    """A running round ends for a lower target, or for ready joiners; never once a member has succeeded."""
    round_ = state.round
    if round_ is None or round_.ending is not None or not round_.formed_at or state.closed_reason:
        return None
    if any(m.state is MemberState.SUCCEEDED for m in round_.members.values()):
        return None
    room = state.settings.target - len(round_.members)
    if room < 0:
        return begin_scale_down(state, round_, now)
    joiners = [n for n in _newcomers(state) if n.agent_id not in round_.members]
    if not joiners or not room:
        return None if state.joiners_since is None else RoundDecision(replace(state, joiners_since=None))
    since = now if state.joiners_since is None else state.joiners_since
    patient = now < since + state.settings.scale_up_stabilization and len(joiners) < room
    if patient and (not state.operator_seen or any(missing_pods(state, ready=True))):
        return RoundDecision(replace(state, joiners_since=since)) if state.joiners_since is None else None
    message = f"{pod_names(n.pod for n in joiners[:room])} joins"
    return begin_end(state, round_, EndReason.SCALING_UP, message, now, on_plan=True)


def _newcomers(state: CoordinatorState) -> list[Node]:
    """Warm nodes that the job wants: one beyond target and spares is about to be told to go."""
    return [n for n in candidates(state) if n.ready and n.index < state.settings.desired_pods]


def _form(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Close a round as soon as everyone who can come has come; the last call is for what nobody knows about."""
    if (
        state.round is not None
        or state.outcome is not None
        or state.recovering_until is not None
        or state.closed_reason
    ):
        return None
    pool = candidates(state)
    survivors = not {n.agent_id for n in pool}.isdisjoint(state.last_members)
    ready = [n for n in pool if n.ready]
    if survivors and len(ready) >= state.settings.min_nodes:
        return _start(state, ready, "with who is left", now)
    if len(pool) < state.settings.min_nodes:
        idle = state.last_call_at is None and state.confirmation_requested_at is None
        return None if idle else RoundDecision(replace(state, last_call_at=None, confirmation_requested_at=None))
    if len(pool) >= state.settings.target:
        return _start(state, pool, "everyone is here", now)
    if state.operator_seen and not any(missing_pods(state, ready=False)):
        return _start(state, pool, "everyone who can come is here", now)
    if state.last_call_at is None:
        return RoundDecision(replace(state, last_call_at=now + state.settings.last_call_timeout), reason="last call")
    return _start(state, pool, "the last call is over", now) if now >= state.last_call_at else None


def _start(state: CoordinatorState, pool: Sequence[Node], why: str, now: float) -> RoundDecision | None:
    if confirmation.needs_confirmation(state, now):
        asking = confirmation.request_confirmation(state, now)
        return None if asking is None else RoundDecision(asking, reason=confirmation.describe_missing(state))
    chosen = rank_assignment.choose_nodes(pool, state.last_members, state.settings.target, state.settings.desired_pods)
    round_id = RoundId(state.attempt, state.store_incarnation, state.round_number + 1)
    members = rank_assignment.assign_ranks(
        chosen,
        round_id,
        restarts=state.charged,
        max_restarts=state.settings.max_restarts,
        progress_timeout=state.settings.progress_timeout,
        hang_ends_round=state.settings.hang_action is not HangAction.EVENT,
    )
    state = replace(
        state,
        round=Round(round_id, members),
        round_number=round_id.number,
        rounds=state.rounds + 1,
        last_members=tuple(members),
        last_call_at=None,
        joiners_since=None,
        confirmation_requested_at=None,
        confirmed_until=None,
    )
    effects = tuple(SendToNode(agent_id, member.assignment) for agent_id, member in members.items())
    effects += tuple(SendToNode(n.agent_id, standby_message(state)) for n in pool if n.agent_id not in members)
    return RoundDecision(state, effects, f"round {round_id} of {len(members)} nodes: {why}")


RULES: tuple[Rule, ...] = (
    adopt_outcome,
    _recover,
    expire_lost_nodes,
    declare_success,
    end_broken_round,
    advance_planned_end,
    conclude_round,
    stalls.name_stalled_worker,
    _dismiss,
    _make_room,
    _form,
)
"""In order: what is known to be over is settled before anything new begins."""
