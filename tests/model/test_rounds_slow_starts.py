"""Jobs in which a process takes long to start, as their agents know: the others go on without an agent that starts
one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from types import ModuleType

import pytest

from elasticjob._runtime.contract.messages import Standby
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.event_handlers import apply_event, standbys
from elasticjob._runtime.rendezvous.observations import slow_starts
from elasticjob._runtime.rendezvous.rounds.starts import round_start
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent
from support.rendezvous.rounds_explorer import explore
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_options import JobOptions
from support.rendezvous.rounds_world import World, begin, calm, faults, settle, step

STATES, WIDE_STATES = 500, 20_000
SEEDS, WIDE_SEEDS, STEPS = 8, 400, 160
START_SECONDS = 100.0
KINDS = ("fail", "fail", "fail", "exit", "collective", "blip", "crash", "sigterm", "cut", "target", "restart-in-place")
SLOW = 5.0
"""Seconds that may pass at once while agents have something to do."""


def start_of(size: int = 3, spares: int = 0, workers: int = 1, increment: int = 1) -> World:
    """All agents but the spares train in their first round, and know what the start of a process takes."""
    options = JobOptions(increment=increment)
    world = begin(size, spares, workers=workers, options=options)
    return settle(replace(world, start_seconds=START_SECONDS))


WORLDS = {
    "three nodes": start_of(),
    "four nodes of two workers": start_of(4, workers=2),
    "a spare": start_of(4, spares=1),
    "steps of two": start_of(4, increment=2),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("kinds", [("fail",), ("exit", "blip"), ("fail", "fail")], ids="+".join)
def test_interleavings_around_a_process_that_is_lost(name: str, kinds: tuple[str, ...], wide: bool) -> None:
    assert not explore(WORLDS[name], kinds, len(kinds), WIDE_STATES if wide else STATES)


def test_interleavings_with_batches(wide: bool) -> None:
    assert not explore(replace(WORLDS["three nodes"], batched=True), ("fail",), 1, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("name", WORLDS)
def test_after_random_faults_the_job_has_its_size_again(name: str, wide: bool) -> None:
    for seed in range(WIDE_SEEDS if wide else SEEDS):
        random, world = Random(seed), replace(WORLDS[name], batched=seed % 4 == 1)
        for _ in range(STEPS):
            moves = list(faults(world, (random.choice(KINDS),))) if random.random() < 0.08 else []
            moves = moves or [m for m in calm(world) if m[0] != "tick" or random.random() < 0.3] or list(calm(world))
            if not moves:
                break
            move = random.choice(moves)
            after = step(world, move)
            if after.now > world.now + SLOW and any(a.inbox or a.stopping for a in world.agents):
                continue  # an agent that is so slow counts as lost: not the subject here
            assert not (wrong := broken_invariants(world, move, after)), f"seed {seed}: {move}: {wrong}"
            world = after
        wrong = smaller_than_its_target(world) or liveness_violation(world, 4000)
        assert not wrong, f"seed {seed}: {wrong}"


def smaller_than_its_target(world: World, limit: int = 1000) -> str:
    """Return why the job does not train with all agents of its target without further faults; empty if it does."""
    for number in range(limit):
        running = (s.state.round for s in world.serving if s.state.round is not None and s.state.round.formed_at)
        if world.declared is not None or any(r.ending is None and len(r.members) == world.wanted for r in running):
            return ""
        moves = [m for m in calm(world) if m[0] != "tick"] or list(calm(world))
        if not moves:
            break
        world = step(world, moves[number % len(moves)])
    return f"after {limit} calm moves, no round of {world.wanted} nodes runs"


def test_a_killed_process_costs_two_rounds_and_one_restart() -> None:
    world = WORLDS["three nodes"]
    sizes = [len(s.state.round.members) for s in world.stores if s.state.round]
    world = step(world, ("fail", 2))
    while moves := [m for m in calm(world) if m[0] != "tick"]:
        before = next((s.state.round for s in world.stores), None)
        world = step(world, moves[0])
        after = next((s.state.round for s in world.stores), None)
        if after is not None and (before is None or before.id != after.id):
            sizes.append(len(after.members))
    assert sizes == [3, 2, 3]
    assert world.charged == 1


def after_a_kill(world: World) -> str:
    """Return the invariants that break while a killed process is replaced; empty if none does.

    The agent loses its link once, before it reads that the others go on without it.
    """
    world, lost_link = step(world, ("fail", 2)), False
    while moves := [m for m in calm(world) if m[0] != "tick"]:
        unread = any(isinstance(message, Standby) for message in world.agent(2).inbox)
        move = ("blip", 2) if unread and not lost_link else moves[0]
        lost_link = lost_link or unread
        after = step(world, move)
        if wrong := broken_invariants(world, move, after):
            return wrong
        world = after
    assert lost_link
    return ""


def _always_ready(state: CoordinatorState, nodes: Iterable[KnownAgent]) -> RoundDecision:
    """Wrong: take an agent that has to start processes for one that is ready."""
    decision = _stand_by(state, nodes)
    return replace(decision, state=state)


_stand_by = standbys.stand_by


@pytest.mark.parametrize(
    ("module", "name", "value", "found"),
    [
        (slow_starts, "without_slow_starts", lambda *_: None, "survivors_do_not_wait_for_a_long_start"),
        (round_start, "stand_by", lambda state, _: RoundDecision(state), "a_node_outside_starts_its_processes"),
        (apply_event, "stand_by", _always_ready, "no_round_ends_for_a_node_that_has_to_start_processes"),
    ],
)
def test_a_seeded_bug_is_found(
    module: ModuleType, name: str, value: object, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not after_a_kill(WORLDS["three nodes"])
    monkeypatch.setattr(module, name, value)
    assert found in after_a_kill(WORLDS["three nodes"])
