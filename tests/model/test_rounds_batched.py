"""What is charged does not depend on which events a coordinator decides together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from elasticjob.contract.messages import EndReason, FailureClass, StepReport, WorkersFailed
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.decision import RoundDecision
from elasticjob.rendezvous.state import CoordinatorEvent, CoordinatorState, NodeMessage, Tick
from support import rounds_world
from support.rounds_invariants import liveness_violation
from support.rounds_world import World, calm, faults, finishing, running, step

SEEDS, DEEP_SEEDS, STEPS = 120, 3000, 40
FAULTS = ("fail", "fail", "blip", "crash", "sigterm", "succeed", "late", "restart-store", "target", "operator-down")


def varied(event: CoordinatorEvent, random: Random) -> CoordinatorEvent:
    """Return the event with what the model's agents never send: broken collectives, and steps."""
    if isinstance(event, NodeMessage) and isinstance(event.message, WorkersFailed) and random.random() < 0.6:
        failure = replace(event.message.failure, kind=FailureClass.COLLECTIVE_FAILED)
        return replace(event, message=replace(event.message, failure=failure))
    if isinstance(event, NodeMessage) and isinstance(event.message, StepReport) and random.random() < 0.8:
        return replace(event, message=replace(event.message, step=random.randrange(5)))
    return event


def events_of_a_turn(world: World, random: Random) -> tuple[World, list[CoordinatorEvent]]:
    """Return what reaches the newest store in one turn of its event loop, and the world without its answers."""
    events: list[CoordinatorEvent] = []
    newest = world.stores[-1].incarnation

    def record(world: World, incarnation: int, event: CoordinatorEvent) -> World:
        events.extend([varied(event, random)] if incarnation == newest else [])
        return world

    kinds = tuple(kind for kind in FAULTS if kind != "restart-store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_world, "_decide", record)
        for _ in range(random.randrange(1, 30)):
            moves = [m for m in calm(world) if m[0] not in ("tick", "connect-old", "old-store-ends")]
            moves = list(faults(world, kinds)) if random.random() < 0.15 else moves
            world = step(world, random.choice(moves)) if moves else world
    if not events or random.random() < 0.2:
        events.insert(random.randrange(len(events) + 1), Tick())
    return world, events


def one_by_one(state: CoordinatorState, events: Sequence[CoordinatorEvent], now: float) -> RoundDecision:
    decision = RoundDecision(state)
    for event in events:
        decision = decision.then(rounds.decide(decision.state, event, now))
    return decision


def settled(before: CoordinatorState, after: CoordinatorState) -> object:
    """Return all that was decided about the rounds that existed before, and about the job."""

    def existed(round_id: RoundId) -> bool:
        return round_id.store_incarnation < before.store_incarnation or round_id.number <= before.round_number

    ended = [e for e in after.ended_rounds if existed(e.round)]
    open_round = after.round if after.round and existed(after.round.id) else None
    ending = open_round.ending if open_round else None
    if open_round and ending:
        # Which nodes can join is not decided together with what is charged.
        open_round = replace(open_round, ending=replace(ending, message=""))
    ended = [e if e.reason is not EndReason.SCALING_UP else replace(e, message="") for e in ended]
    return ended, open_round, after.charged, after.outcome, after.failure


def next_world(world: World, random: Random) -> World:
    """Return the world after one turn, decided together; fail if one event after the other decides otherwise."""
    if random.random() < 0.04:
        world = step(world, ("restart-store", 0))
    due = rounds.next_deadline(world.stores[-1].state, world.now)
    if due is not None and random.random() < 0.5:
        world = replace(world, now=due)
    world, events = events_of_a_turn(world, random)
    store = world.stores[-1]
    together = rounds.decide_together(store.state, events, world.now)
    apart = one_by_one(store.state, events, world.now)
    assert settled(store.state, together.state) == settled(store.state, apart.state), events
    return rounds_world.after_decision(world, store.incarnation, together)


@pytest.mark.parametrize("start", range(6))
def test_events_decided_together_charge_what_they_charge_one_by_one(start: int, deep: bool) -> None:
    seeds = (DEEP_SEEDS if deep else SEEDS) // 6
    for seed in range(start * seeds, (start + 1) * seeds):
        random, world = Random(seed), running(3 + seed % 3, spares=seed % 2) if seed % 8 else finishing()
        for _ in range(STEPS):
            world = next_world(world, random)
        assert not liveness_violation(world, 4000), seed
