"""The rules of rounds: `decide(state, event, now) -> RoundDecision(state, effects, reason)`. Pure.

`apply_event` changes the state by an event. `apply_rules` then applies the first of RULES that fits, until none does.
This module has the rules that start a round, resize it, and release nodes; `round_end` has those that end one.
`store_pod.coordinator` does the I/O. `contract.messages` describes the states of a member and the reasons for which a
round ends.

    Gathering ──start round──► Running ──broken, resized──► Ending ──conclude──► Gathering
        ▲                         │ all workers succeeded      │ maxRestarts used up
    Recovering                    ▼                            ▼
                              Finished(Succeeded)          Finished(Failed)

Recovery may also lead to Running, if the round that the store found goes on, or to Ending.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from elasticjob._runtime.contract.messages import Announce, EndReason, Finish, HangAction, MemberState, Outcome
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.rendezvous import standby_store, store_recovery
from elasticjob._runtime.rendezvous.apply_event import apply_event, stand_by, stop_stale_round
from elasticjob._runtime.rendezvous.decision import RoundDecision, Rule, join_reasons, pod_names
from elasticjob._runtime.rendezvous.event_batch import Settled, changes_no_rule, count_open, follow, may_wait
from elasticjob._runtime.rendezvous.observations import slow_starts, stalls
from elasticjob._runtime.rendezvous.rounds import confirmation, planned_end, rank_assignment, restart_delay
from elasticjob._runtime.rendezvous.rounds.round_break import break_round
from elasticjob._runtime.rendezvous.rounds.round_end import (
    adopt_outcome,
    advance_planned_end,
    begin_end,
    begin_scale_down,
    conclude_round,
    declare_success,
    end_broken_round,
    expire_lost_nodes,
    mark_finished_as_stopped,
    stop_deadline,
)
from elasticjob._runtime.rendezvous.state import (
    RECONNECT_GRACE,
    CoordinatorEvent,
    CoordinatorState,
    Node,
    NodeDisconnected,
    NodeMessage,
    Round,
    SendToNode,
    candidates,
    departure_reason,
    expected_pod,
    missing_pods,
    superseded,
    topology_of,
)


def decide(state: CoordinatorState, event: CoordinatorEvent, now: float) -> RoundDecision:
    """Apply one event, then the rules. `now` is the coordinator's monotonic time in seconds."""
    return decide_together(state, (event,), now)


def decide_together(
    state: CoordinatorState, events: Iterable[CoordinatorEvent], now: float, settled: Settled | None = None
) -> RoundDecision:
    """Apply events that arrived together, in order; the rules run once for as many of them as `event_batch` allows.

    What is charged, its cause and the job's outcome are the same as if `decide` got one event after the other.
    `settled`: what is known of `state` from the last decision (`RoundDecision.settled`, or `settle`).
    """
    batch = _Batch(state, now, settled)
    for event in events:
        batch.apply(event)
    return batch.decision()


def settle(state: CoordinatorState, now: float) -> Settled:
    """Return what is known of a state on which the rules have run. Its cost grows with the number of nodes."""
    return Settled(next_deadline(state, now), count_open(state))


class _Batch:
    """Events that are decided together."""

    def __init__(self, state: CoordinatorState, now: float, settled: Settled | None) -> None:
        self._state, self._now = state, now
        due = settled is None or (settled.until is not None and now >= settled.until)
        self._settled = None if due else settled
        """What was known of the state at first; None once the rules have run."""
        self._effects: list[SendToNode] = []
        self._addressed: set[str] = set()
        self._reasons: list[str] = []
        self._rule_reasons: list[str] = []
        self._counts = self._settled.counts if self._settled else None
        """Of the present state, once they are needed; None after the rules have run."""
        self._first = self._rules_wait = self._settled is None
        self._may_join = False
        """Whether nodes may join because of events since the rules ran: some that are not `NodeDisconnected`."""

    def apply(self, event: CoordinatorEvent) -> None:
        waits = self._may_wait(event)
        if self._rules_wait and not self._first and not (waits and self._keeps_joiners(event)):
            self._apply_rules()
        if isinstance(event, NodeMessage) and isinstance(event.message, Announce):
            self._drop_effects_of_old_link(event.agent_id)
        quiet = waits and self._counts is not None and changes_no_rule(self._state, event, self._counts)
        applied = apply_event(self._state, event, self._now)
        if waits and self._counts is not None and isinstance(event, (NodeMessage, NodeDisconnected)):
            self._counts = follow(self._counts, self._state, applied.state, event.agent_id)
        self._state = applied.state
        self._send(applied.effects)
        self._reasons += [applied.reason] if applied.reason else []
        self._first, self._rules_wait = False, self._rules_wait or not quiet
        self._may_join = self._may_join or not isinstance(event, NodeDisconnected)
        if not waits:
            self._apply_rules()

    def _may_wait(self, event: CoordinatorEvent) -> bool:
        """Return whether the rules need not run around this event. After the first one a deadline may have passed."""
        if self._first:
            return False
        if self._counts is None:
            self._counts = count_open(self._state)
        return may_wait(self._state, event, self._counts, self._now)

    def _keeps_joiners(self, event: CoordinatorEvent) -> bool:
        """Return whether the event leaves it open whether joining nodes end the round. They wait for a missing node."""
        running = self._state.round is not None and self._state.round.ending is None
        return not (running and self._may_join and isinstance(event, NodeDisconnected))

    def _send(self, effects: tuple[SendToNode, ...]) -> None:
        self._effects += effects
        self._addressed.update(e.agent_id for e in effects)

    def _drop_effects_of_old_link(self, agent_id: str) -> None:
        """Drop messages to a node that has connected anew. The answer to its `Announce` makes up for them."""
        if agent_id in self._addressed:
            self._effects = [e for e in self._effects if e.agent_id != agent_id]

    def _apply_rules(self) -> None:
        ruled = apply_rules(self._state, self._now)
        self._state, self._counts, self._rules_wait, self._may_join = ruled.state, None, False, False
        self._settled = None
        self._send(ruled.effects)
        self._rule_reasons += [ruled.reason] if ruled.reason else []

    def decision(self) -> RoundDecision:
        if self._rules_wait:
            self._apply_rules()
        reasons = (join_reasons(self._reasons), *self._rule_reasons)
        settled = Settled(self._settled.until, self._counts) if self._settled and self._counts else None
        return RoundDecision(self._state, tuple(self._effects), "; ".join(r for r in reasons if r), settled)


def apply_rules(state: CoordinatorState, now: float) -> RoundDecision:
    """Apply the rules until none applies. A closed store applies none, a passive standby store may only take over."""
    decision = RoundDecision(_mark_formed(state, now))
    while state.newer_store is None:
        rules = (standby_store.take_over,) if decision.state.passive else RULES
        step = next((s for rule in rules if (s := rule(decision.state, now)) is not None), None)
        if step is None:
            break
        decision = decision.then(step)
    return decision


def _mark_formed(state: CoordinatorState, now: float) -> CoordinatorState:
    """Set the time at which all workers of the round had started.

    Its cost grows with the number of members, so it runs once for all events that arrived together.
    """
    round_ = state.round
    if round_ is None or round_.formed_at or round_.ending is not None:
        return state
    if any(m.state is MemberState.STARTING for m in round_.members.values()):
        return state
    return replace(state, round=replace(round_, formed_at=state.epoch + now))


def next_deadline(state: CoordinatorState, now: float) -> float | None:
    """Return when the next `Tick` is due if no event comes before; None: never."""
    if state.newer_store is not None or state.passive:
        return None
    times = [n.disconnected_at + RECONNECT_GRACE for n in state.nodes.values() if n.disconnected_at is not None]
    if state.outcome is None:
        if state.confirmation_requested_at is not None:
            times.append(state.confirmation_requested_at + confirmation.CONFIRMATION_SECONDS)
        deadlines = (
            state.last_call_at,
            restart_delay.delay_deadline(state),
            state.recovering_until,
            store_recovery.lost_node_deadline(state),
            store_recovery.takeover_deadline(state),
            stalls.stall_deadline(state),
        )
        times += [t for t in deadlines if t is not None]
        if state.joiners_since is not None:
            times.append(state.joiners_since + state.settings.scale_up_stabilization)
        if state.round is not None and state.round.ending is not None:
            deadline = planned_end.planned_end_deadline(state.round, state.settings.graceful_shutdown)
            times.append(deadline if deadline is not None else stop_deadline(state, state.round.ending))
    return min((t for t in times if t > now), default=None)


def _release_departing_nodes(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Send `Finish` to nodes outside the round that are leaving; if the rendezvous is closed, to all outside it."""
    if state.recovering_until is not None or state.outcome is not None:
        return None
    members = state.round.members.keys() if state.round else ()
    outside = [n for n in state.nodes.values() if n.disconnected_at is None and n.agent_id not in members]
    departing = [n for n in outside if state.closed_reason or departure_reason(state, n)]
    if not departing:
        return None
    effects = tuple(SendToNode(n.agent_id, _release_message(state, n)) for n in departing)
    released = {n.agent_id for n in departing}
    nodes = {agent_id: n for agent_id, n in state.nodes.items() if agent_id not in released}
    return RoundDecision(replace(state, nodes=nodes), effects, f"{pod_names(n.pod for n in departing)} released")


def _release_message(state: CoordinatorState, node: Node) -> Finish:
    if superseded(state, node):
        return Finish(Outcome.SUPERSEDED, "Superseded", departure_reason(state, node))
    if state.closed_reason:
        return Finish(Outcome.LEFT, "RendezvousClosed", state.closed_reason)
    return Finish(Outcome.LEFT, "NodeLeft", departure_reason(state, node))


def _finish_recovery(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Restore the round that a successor store found, or end it, or go on without one."""
    recovery = store_recovery.evaluate_recovery(state, now)
    if recovery is None:
        return None
    found = recovery.round
    state = replace(state, recovering_until=None, recovery_failures={})
    outsiders = [n for n in state.nodes.values() if found is None or n.agent_id not in found.members]
    decision = RoundDecision(state, reason=recovery.reason)
    for node in outsiders:
        if node.membership is not None and node.membership.state is not MemberState.STOPPED:
            decision = decision.then(stop_stale_round(decision.state, node, node.membership.assignment.round))
    if found is None:
        return replace(decision, state=store_recovery.with_last_round(decision.state))
    # Each store incarnation numbers its own rounds.
    own = found.id.store_incarnation == state.store_incarnation
    state = replace(
        decision.state,
        round=found,
        round_number=max(state.round_number, found.id.number) if own else state.round_number,
        rounds=state.rounds + 1,
        last_members=tuple(found.members),
    )
    decision = replace(decision, state=state)
    if recovery.end is None:
        assignments = tuple(SendToNode(agent_id, member.assignment) for agent_id, member in found.members.items())
        continued = replace(decision, effects=decision.effects + assignments)
        # One that has to start processes begins now: it is not to be taken into a round before they wait.
        waiting = [n for n in outsiders if n.disconnected_at is None and state.nodes[n.agent_id].stale_round is None]
        return continued.then(stand_by(state, waiting))
    return decision.then(begin_end(state, found, recovery.end, recovery.reason, now))


def _resize_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """End a running round for a lower target, or for joining nodes; never once a member has succeeded.

    A round with free places waits for the stabilization window, so that nodes which come one after the other join
    together. It does not wait if it becomes full, or if no further pod is expected.
    """
    round_ = state.round
    if round_ is None or round_.ending is not None or not round_.formed_at or state.closed_reason:
        return None
    if any(m.state is MemberState.SUCCEEDED for m in round_.members.values()):
        return None
    free = state.settings.target - len(round_.members)
    if free < 0:
        return begin_scale_down(state, round_, now)
    joining = [n for n in _wanted_ready_nodes(state) if n.agent_id not in round_.members]
    places = state.settings.round_size(len(round_.members) + len(joining)) - len(round_.members)
    if places <= 0:
        return None if state.joiners_since is None else RoundDecision(replace(state, joiners_since=None))
    since = now if state.joiners_since is None else state.joiners_since
    may_wait = now < since + state.settings.scale_up_stabilization and len(joining) < free
    if may_wait and (not state.operator_seen or any(missing_pods(state, ready=True))):
        return RoundDecision(replace(state, joiners_since=since)) if state.joiners_since is None else None
    message = f"{with_noun(places, 'node')} can join: {pod_names(n.pod for n in joining[:places])}"
    return begin_end(state, round_, EndReason.SCALING_UP, message, now, on_plan=True)


def _wanted_ready_nodes(state: CoordinatorState) -> list[Node]:
    """Return the ready candidates, without those beyond the target and the spares: the operator deletes their pods."""
    return [n for n in candidates(state) if n.ready and n.index < state.settings.desired_pods]


def _form_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Start a round as soon as no further node is expected. The last call bounds the wait for nodes of unknown number.

    After a fault the surviving nodes start as soon as at least `min_nodes` are ready; others join later.
    """
    if (
        state.round is not None
        or state.outcome is not None
        or state.recovering_until is not None
        or state.restart_delay is not None
        or state.closed_reason
    ):
        return None
    pool = candidates(state)
    has_survivor = not {n.agent_id for n in pool}.isdisjoint(state.last_members)
    ready = [n for n in pool if n.ready]
    if has_survivor and len(ready) < state.settings.target and _reconnecting_members(state, now):
        return None
    if has_survivor and len(ready) >= state.settings.min_nodes:
        without = slow_starts.without_slow_starts(state, ready, partial(_chosen, state))
        if without is not None:
            return _start_round(state, without.pool, without.reason, now, without.left_out)
        return _start_round(state, ready, "all nodes that are ready", now)
    if len(pool) < state.settings.min_nodes:
        idle = state.last_call_at is None and state.confirmation_requested_at is None
        return None if idle else RoundDecision(replace(state, last_call_at=None, confirmation_requested_at=None))
    if len(pool) >= state.settings.target:
        return _start_round(state, pool, "the target is reached", now)
    if state.operator_seen and not any(missing_pods(state, ready=False)):
        return _start_round(state, pool, "no further node is expected", now)
    if state.last_call_at is None:
        timeout = state.settings.last_call_timeout
        reason = f"last call: waiting up to {timeout:g} s for more nodes"
        return RoundDecision(replace(state, last_call_at=now + timeout), reason=reason)
    return _start_round(state, pool, "the last call is over", now) if now >= state.last_call_at else None


def _reconnecting_members(state: CoordinatorState, now: float) -> list[Node]:
    """Return members of the last round whose link has just closed. A round without them would soon end for them."""
    last = (state.nodes.get(agent_id) for agent_id in state.last_members)
    return [n for n in last if n and n.disconnected_at is not None and not n.expired(now) and _may_return(state, n)]


def _may_return(state: CoordinatorState, node: Node) -> bool:
    wanted = not state.operator_seen or expected_pod(state, node.index) is not None
    return wanted and node.index < state.settings.desired_pods and not departure_reason(state, node)


def _chosen(state: CoordinatorState, pool: Sequence[Node]) -> list[Node]:
    """Return the nodes of the pool that a round would have, in order of group rank."""
    settings = state.settings
    size, place = settings.round_size(len(pool)), partial(topology_of, state)
    return rank_assignment.choose_nodes(pool, state.last_members, size, settings.desired_pods, place)


def _start_round(
    state: CoordinatorState, pool: Sequence[Node], why: str, now: float, left_out: Sequence[Node] = ()
) -> RoundDecision | None:
    """Assign ranks to the chosen nodes of the pool; if a confirmation is needed first, request it.

    `left_out`: nodes outside the pool that stand by, as those of the pool that are not chosen.
    """
    if confirmation.needs_confirmation(state, now):
        requested = confirmation.request_confirmation(state, now)
        reason = f"{confirmation.describe_missing(state)}; the operator is asked whether this is the only store"
        return None if requested is None else RoundDecision(requested, reason=reason)
    settings, chosen = state.settings, _chosen(state, pool)
    round_id = RoundId(state.attempt, state.store_incarnation, state.round_number + 1)
    members = rank_assignment.assign_ranks(
        chosen,
        round_id,
        restarts=state.charged,
        max_restarts=settings.max_restarts,
        progress_timeout=settings.progress_timeout,
        hang_ends_round=settings.hang_action is not HangAction.EVENT,
        state_known=state.rounds == 0 or any(node.has_state for node in chosen),
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
    started = RoundDecision(state, effects, f"round {round_id} starts with {with_noun(len(members), 'node')}: {why}")
    return started.then(stand_by(state, [n for n in (*pool, *left_out) if n.agent_id not in members]))


RULES: tuple[Rule, ...] = (
    adopt_outcome,
    _finish_recovery,
    mark_finished_as_stopped,
    expire_lost_nodes,
    declare_success,
    end_broken_round,
    advance_planned_end,
    break_round,
    conclude_round,
    stalls.name_stalled_worker,
    _release_departing_nodes,
    _resize_round,
    restart_delay.end_delay,
    _form_round,
)
"""In order of precedence: what has ended is settled before a new round starts."""
