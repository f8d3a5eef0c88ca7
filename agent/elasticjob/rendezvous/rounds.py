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
from elasticjob.rendezvous.apply_event import observe, out_of_date, standby
from elasticjob.rendezvous.decision import Decision, Rule, names, several
from elasticjob.rendezvous.round_end import (
    agree,
    believe,
    conclude,
    end,
    end_broken,
    lose,
    scale_down,
    stop_deadline,
    succeed,
)
from elasticjob.rendezvous.state import (
    BLIP_GRACE,
    Event,
    Node,
    Round,
    Send,
    State,
    awaited,
    candidates,
    departing,
    superseded,
)


def decide(state: State, event: Event, now: float) -> Decision:
    """Take one event in and do what follows from it. `now` is the coordinator's monotonic clock, in seconds."""
    return decide_together(state, (event,), now)


def decide_together(state: State, events: Iterable[Event], now: float) -> Decision:
    """Take in events that arrived together, in order, then do what follows from them all."""
    effects: list[Send] = []
    reasons: list[str] = []
    for event in events:
        seen = observe(state, event, now)
        state = seen.state
        effects += seen.effects
        reasons += [seen.reason] if seen.reason else []
    return Decision(state, tuple(effects), several(reasons)).then(settle(state, now))


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
            times.append(state.asked_at + confirmation.WORD_HOLDS)
        waits = (state.last_call_at, state.recovering_until, store_recovery.deadline(state), stalls.deadline(state))
        times += [t for t in waits if t is not None]
        if state.joiners_since is not None:
            times.append(state.joiners_since + state.settings.scale_up_stabilization)
        if state.round is not None and state.round.ending is not None:
            plan = planned_end.deadline(state.round, state.settings.graceful_shutdown)
            times.append(plan if plan is not None else stop_deadline(state, state.round.ending))
    return min((t for t in times if t > now), default=None)


def _dismiss(state: State, now: float) -> Decision | None:
    """Nodes in no round that are about to go, or that no round will take, may go."""
    if state.recovering_until is not None or state.outcome is not None:
        return None
    members = state.round.members.keys() if state.round else ()
    outside = [n for n in state.nodes.values() if n.gone_at is None and n.boot not in members]
    going = [n for n in outside if state.closed or departing(state, n)]
    if not going:
        return None
    effects = tuple(Send(n.boot, _farewell(state, n)) for n in going)
    told = {n.boot for n in going}
    nodes = {b: n for b, n in state.nodes.items() if b not in told}
    return Decision(replace(state, nodes=nodes), effects, f"{names(n.pod for n in going)} may go")


def _farewell(state: State, node: Node) -> Finish:
    if superseded(state, node):
        return Finish(Outcome.SUPERSEDED, "Superseded", departing(state, node))
    if state.closed:
        return Finish(Outcome.LEFT, "RendezvousClosed", state.closed)
    return Finish(Outcome.LEFT, "NodeLeft", departing(state, node))


def _recover(state: State, now: float) -> Decision | None:
    """A successor store restores the round it finds, ends it, or finds none."""
    verdict = store_recovery.judge(state, now)
    if verdict is None:
        return None
    state = replace(state, recovering_until=None)
    outsiders = [n for n in state.nodes.values() if verdict.round is None or n.boot not in verdict.round.members]
    decision = Decision(state, reason=verdict.reason)
    for node in outsiders:
        if node.membership is not None and node.membership.state is not MemberState.STOPPED:
            decision = decision.then(out_of_date(decision.state, node, node.membership.assignment.round))
    if verdict.round is None:
        return replace(decision, state=store_recovery.past(decision.state))
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
    return decision.then(end(state, verdict.round, EndReason.AGENT_LOST, verdict.reason, now))


def _make_room(state: State, now: float) -> Decision | None:
    """A running round ends for a lower target, or for ready joiners; never once a member has succeeded."""
    round_ = state.round
    if round_ is None or round_.ending is not None or not round_.formed_at or state.closed:
        return None
    if any(m.state is MemberState.SUCCEEDED for m in round_.members.values()):
        return None
    room = state.settings.target - len(round_.members)
    if room < 0:
        return scale_down(state, round_, now)
    joiners = [n for n in _newcomers(state) if n.boot not in round_.members]
    if not joiners or not room:
        return None if state.joiners_since is None else Decision(replace(state, joiners_since=None))
    since = now if state.joiners_since is None else state.joiners_since
    patient = now < since + state.settings.scale_up_stabilization and len(joiners) < room
    if patient and (not state.informed or any(awaited(state, ready=True))):
        return Decision(replace(state, joiners_since=since)) if state.joiners_since is None else None
    message = f"{names(n.pod for n in joiners[:room])} joins"
    return end(state, round_, EndReason.SCALING_UP, message, now, on_plan=True)


def _newcomers(state: State) -> list[Node]:
    """Warm nodes that the job wants: one beyond target and spares is about to be told to go."""
    return [n for n in candidates(state) if n.ready and n.slot < state.settings.slots]


def _form(state: State, now: float) -> Decision | None:
    """Close a round as soon as everyone who can come has come; the last call is for what nobody knows about."""
    if state.round is not None or state.outcome is not None or state.recovering_until is not None or state.closed:
        return None
    pool = candidates(state)
    survivors = not {n.boot for n in pool}.isdisjoint(state.last_members)
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
    if confirmation.needs_word(state, now):
        asking = confirmation.ask(state, now)
        return None if asking is None else Decision(asking, reason=confirmation.words(state))
    chosen = rank_assignment.choose(pool, state.last_members, state.settings.target, state.settings.slots)
    round_id = RoundId(state.attempt, state.store, state.n + 1)
    members = rank_assignment.assign(
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
        n=round_id.n,
        rounds=state.rounds + 1,
        last_members=tuple(members),
        last_call_at=None,
        joiners_since=None,
        asked_at=None,
        word_until=None,
    )
    effects = tuple(Send(boot, member.assignment) for boot, member in members.items())
    effects += tuple(Send(n.boot, standby(state)) for n in pool if n.boot not in members)
    return Decision(state, effects, f"round {round_id} of {len(members)} nodes: {why}")


RULES: tuple[Rule, ...] = (
    believe, _recover, lose, succeed, end_broken, agree, conclude, stalls.tell, _dismiss, _make_room, _form,
)  # fmt: skip
"""In order: what is known to be over is settled before anything new begins."""
