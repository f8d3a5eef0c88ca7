"""The rules of rounds: `decide(state, event, now) -> RoundDecision(state, effects, reason)`. Pure.

`event_handlers.apply_event` changes the state by an event. `apply_rules` then applies the first of RULES that fits,
until none does. Each rule has its module in `starts` or `ends`. `store_pod.coordinator` does the I/O.
`contract.messages` describes the states of a member and the reasons for which a round ends.

    Gathering ──start round──► Running ──broken, resized──► Ending ──conclude──► Gathering
        ▲                         │ all workers succeeded      │ maxRestarts used up
    Recovering                    ▼                            ▼
                              Finished(Succeeded)          Finished(Failed)

Recovery may also lead to Running, if the round that the store found goes on, or to Ending.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticjob._runtime.contract.messages import Announce, MemberState
from elasticjob._runtime.rendezvous import standby_store, store_recovery
from elasticjob._runtime.rendezvous.decision import RoundDecision, Rule, join_reasons
from elasticjob._runtime.rendezvous.event_batch import Settled, count_open, follow, needs_no_rules, rules_may_wait
from elasticjob._runtime.rendezvous.event_handlers.apply_event import apply_event
from elasticjob._runtime.rendezvous.observations import stalls
from elasticjob._runtime.rendezvous.rounds.ends import planned_end
from elasticjob._runtime.rendezvous.rounds.ends.code_update import end_for_new_code
from elasticjob._runtime.rendezvous.rounds.ends.lost_members import expire_lost_members, mark_finished_as_stopped
from elasticjob._runtime.rendezvous.rounds.ends.round_break import break_round
from elasticjob._runtime.rendezvous.rounds.ends.round_conclusion import conclude_round, declare_success
from elasticjob._runtime.rendezvous.rounds.ends.round_end import (
    advance_planned_end,
    end_broken_round,
    stop_deadline,
)
from elasticjob._runtime.rendezvous.rounds.ends.round_size import resize_round
from elasticjob._runtime.rendezvous.rounds.job_outcome import adopt_outcome
from elasticjob._runtime.rendezvous.rounds.release import release_departing_agents
from elasticjob._runtime.rendezvous.rounds.stages import finish_stage
from elasticjob._runtime.rendezvous.rounds.starts import confirmation, restart_delay
from elasticjob._runtime.rendezvous.rounds.starts.recovered_round import finish_recovery
from elasticjob._runtime.rendezvous.rounds.starts.round_start import form_round
from elasticjob._runtime.rendezvous.state import (
    RECONNECT_GRACE,
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
    SendToAgent,
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
    """Return what is known of a state on which the rules have run. Its cost grows with the number of agents."""
    return Settled(next_deadline(state, now), count_open(state))


class _Batch:
    """Events that are decided together."""

    def __init__(self, state: CoordinatorState, now: float, settled: Settled | None) -> None:
        self._state, self._now = state, now
        due = settled is None or (settled.until is not None and now >= settled.until)
        self._settled = None if due else settled
        """What was known of the state at first; None once the rules have run."""
        self._effects: list[SendToAgent] = []
        self._addressed: set[str] = set()
        self._reasons: list[str] = []
        self._rule_reasons: list[str] = []
        self._counts = self._settled.counts if self._settled else None
        """Of the present state, once they are needed; None after the rules have run."""
        self._first = self._rules_wait = self._settled is None
        self._has_possible_joins = False
        """Whether agents may join because of events since the rules ran: some that are not `AgentDisconnected`."""

    def apply(self, event: CoordinatorEvent) -> None:
        waits = self._rules_may_wait(event)
        if self._rules_wait and not self._first and not (waits and self._is_independent_of_joins(event)):
            self._apply_rules()
        if isinstance(event, AgentMessage) and isinstance(event.message, Announce):
            self._drop_effects_of_old_link(event.agent_id)
        quiet = waits and self._counts is not None and needs_no_rules(self._state, event, self._counts)
        applied = apply_event(self._state, event, self._now)
        if waits and self._counts is not None and isinstance(event, (AgentMessage, AgentDisconnected)):
            self._counts = follow(self._counts, self._state, applied.state, event.agent_id)
        self._state = applied.state
        self._send(applied.effects)
        self._reasons += [applied.reason] if applied.reason else []
        self._first, self._rules_wait = False, self._rules_wait or not quiet
        self._has_possible_joins = self._has_possible_joins or not isinstance(event, AgentDisconnected)
        if not waits:
            self._apply_rules()

    def _rules_may_wait(self, event: CoordinatorEvent) -> bool:
        """Return whether the rules need not run around this event. After the first one a deadline may have passed."""
        if self._first:
            return False
        if self._counts is None:
            self._counts = count_open(self._state)
        return rules_may_wait(self._state, event, self._counts, self._now)

    def _is_independent_of_joins(self, event: CoordinatorEvent) -> bool:
        """Return False if an agent of the batch may have joined a running round, and this is a disconnect.

        Whether joining agents end a running round depends on which pods are missing. The disconnect would change that
        answer, so the rules must run between the two.
        """
        running = self._state.round is not None and self._state.round.ending is None
        return not (running and self._has_possible_joins and isinstance(event, AgentDisconnected))

    def _send(self, effects: tuple[SendToAgent, ...]) -> None:
        self._effects += effects
        self._addressed.update(e.agent_id for e in effects)

    def _drop_effects_of_old_link(self, agent_id: str) -> None:
        """Drop messages to an agent that has connected again. The answer to its `Announce` replaces them."""
        if agent_id in self._addressed:
            self._effects = [e for e in self._effects if e.agent_id != agent_id]

    def _apply_rules(self) -> None:
        ruled = apply_rules(self._state, self._now)
        self._state, self._counts, self._rules_wait, self._has_possible_joins = ruled.state, None, False, False
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
    times = [n.disconnected_at + RECONNECT_GRACE for n in state.agents.values() if n.disconnected_at is not None]
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


RULES: tuple[Rule, ...] = (
    adopt_outcome,
    finish_recovery,
    mark_finished_as_stopped,
    expire_lost_members,
    declare_success,
    finish_stage,
    end_broken_round,
    advance_planned_end,
    break_round,
    conclude_round,
    stalls.name_stalled_worker,
    release_departing_agents,
    end_for_new_code,
    resize_round,
    restart_delay.end_delay,
    form_round,
)
"""In order of precedence: what has ended is settled before a new round starts."""
