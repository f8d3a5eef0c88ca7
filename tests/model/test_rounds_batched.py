"""What is charged does not depend on which events a coordinator decides together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from elasticjob._runtime.contract.messages import FailureClass, StepReport, WorkersFailed
from elasticjob._runtime.rendezvous.event_batch import Settled
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import AgentMessage, CoordinatorEvent, CoordinatorState, SendToAgent
from support.rendezvous import rounds_invariants
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_world import World, calm, faults, finishing, running, step

SEEDS, WIDE_SEEDS, STEPS = 120, 3000, 40
FAULTS = (
    "fail", "fail", "collective", "blip", "half-open", "doubt", "deaf", "crash", "sigterm", "succeed", "late", "target",
    "operator-down", "old-view",
)  # fmt: skip
INVARIANTS_OF_VARIED_EVENTS = tuple(
    invariant for invariant in rounds_invariants.INVARIANTS
    if invariant not in (
        rounds_invariants.each_failure_is_charged_once,
        rounds_invariants.no_round_starts_before_failures_are_charged,
        rounds_invariants.a_planned_end_loses_no_step,
    )
)  # fmt: skip
"""The others compare decisions with what happened in truth, which events that were varied do not report."""


def varied(event: CoordinatorEvent, random: Random) -> CoordinatorEvent:
    """Return the event with what the model's agents never send: collectives that break first, and other steps."""
    if isinstance(event, AgentMessage) and isinstance(event.message, WorkersFailed) and random.random() < 0.6:
        failure = replace(event.message.failure, kind=FailureClass.COLLECTIVE_FAILED)
        return replace(event, message=replace(event.message, failure=failure))
    if isinstance(event, AgentMessage) and isinstance(event.message, StepReport) and random.random() < 0.8:
        return replace(event, message=replace(event.message, step=random.randrange(5)))
    return event


def decided_one_by_one(
    state: CoordinatorState, events: Iterable[CoordinatorEvent], now: float, *, settled: bool
) -> tuple[CoordinatorState, tuple[SendToAgent, ...]]:
    """Return the state and the messages after each event was decided alone.

    `settled`: each decision uses what the last one knew, so that the rules need not run for it.
    """
    sent: tuple[SendToAgent, ...] = ()
    known: Settled | None = None
    for event in events:
        decision = rounds.decide_together(state, (event,), now, known)
        state, sent = decision.state, sent + decision.effects
        known = (decision.settled or rounds.settle(state, now)) if settled else None
    return state, sent


def turn(world: World, random: Random) -> World:
    """Return the world after one turn of the event loops of its agents, and then of its store.

    Fail if the store decides otherwise than it would on one event after the other, or than it would if the rules ran
    after each.
    """
    if random.random() < 0.04 and world.stores:
        world = step(world, random.choice((("restart-store", 0), ("restart-in-place", 0))))
    if random.random() < 0.5 and ("tick", 0) in list(calm(world)):
        world = step(world, ("tick", 0))
    for _ in range(random.randrange(1, 30)):
        moves = [m for m in calm(world) if m[0] not in ("tick", "turn", "connect-old", "old-store-ends")]
        moves = list(faults(world, FAULTS)) if random.random() < 0.15 else moves
        world = step(world, random.choice(moves)) if moves else world
    for store in world.stores:
        queue = tuple(varied(event, random) for event in store.queue)
        always, seldom = (decided_one_by_one(store.state, queue, world.now, settled=known) for known in (False, True))
        assert always == seldom, queue
        stores = tuple(replace(s, queue=queue) if s.incarnation == store.incarnation else s for s in world.stores)
        world = replace(world, stores=stores)
        after = step(world, ("turn", store.incarnation))
        wrong = broken_invariants(world, ("turn", store.incarnation), after, INVARIANTS_OF_VARIED_EVENTS)
        assert not wrong, (wrong, queue)
        world = after
    return world


@pytest.mark.parametrize("start", range(6))
def test_events_decided_together_charge_what_they_charge_one_by_one(start: int, wide: bool) -> None:
    seeds = (WIDE_SEEDS if wide else SEEDS) // 6
    for seed in range(start * seeds, (start + 1) * seeds):
        random, world = Random(seed), running(3 + seed % 3, spares=seed % 2) if seed % 8 else finishing()
        world = replace(world, batched=True, backoff=seed % 2)
        for _ in range(STEPS):
            world = turn(world, random)
        assert not liveness_violation(world, 4000, INVARIANTS_OF_VARIED_EVENTS), seed
