"""Jobs whose spec asks for more: steps of size, failure rules, a restart window, Recreate, successPolicy Any.

The worlds, their moves and their invariants are those of all other rounds; each invariant says what it means for a job
with such a field.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from elasticjob._runtime.contract.messages import Outcome
from support.rendezvous.rounds_agent import Agent
from support.rendezvous.rounds_explorer import explore
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_options import JobOptions
from support.rendezvous.rounds_world import Move, World, begin, calm, faults, settle, step

STATES, WIDE_STATES = 600, 20_000
SEEDS, WIDE_SEEDS = 16, 400
SLOW = 5.0
"""Seconds that may pass at once while agents have something to do."""


@dataclass(frozen=True)
class Case:
    """A job with options, and the faults of its walks; a kind that is listed twice is twice as frequent."""

    options: JobOptions
    kinds: tuple[str, ...]
    size: int = 3
    steps: int = 160
    """Moves of a walk."""


CASES = {
    "step": Case(
        JobOptions(increment=2), ("crash", "vanish", "blip", "sigterm", *["target"] * 2, "restart-store"), size=4
    ),
    "fail-job": Case(JobOptions(rules="fail-job"), ("exit", *["fail"] * 5, "crash", "blip", "restart-in-place")),
    "ignore": Case(JobOptions(rules="ignore"), ("exit", *["fail"] * 4, "crash", "blip", "operator-down")),
    "count": Case(JobOptions(rules="count"), ("exit", "exit", "fail", "crash", "blip", "restart-store")),
    "window": Case(
        JobOptions(window=100),
        (*["fail"] * 4, *["pass"] * 4, "restart-store", "restart-in-place", "operator-down", "old-view"),
        steps=500,
    ),
    "recreate": Case(
        JobOptions(recreate=True), ("fail", "fail", "crash", "blip", "blip", "vanish", "sigterm", "operator-down")
    ),
    "any": Case(JobOptions(any_success=True), ("succeed", "fail", "fail", "crash", "blip", "late", "restart-store")),
}


def start_of(name: str, seed: int = 0) -> World:
    """Return the world in which all agents of the job train in their first round; its budget is 1 to 3, by the seed."""
    case = CASES[name]
    world = settle(begin(case.size, budget=1 + seed % 3, options=case.options))
    return replace(world, batched=seed % 4 == 1)


def next_moves(world: World, random: Random, kinds: tuple[str, ...]) -> list[Move]:
    """Return the moves to choose from: a fault in 12 % of the cases and when nothing else happens, seldom a tick."""
    moves = list(calm(world))
    if not moves or random.random() < 0.12:
        moves = list(faults(world, (random.choice(kinds),))) or moves
    return [m for m in moves if m[0] != "tick" or random.random() < 0.3] or moves


@pytest.mark.parametrize("name", CASES)
def test_walks_of_a_job_with_options(name: str, wide: bool) -> None:
    for seed in range(WIDE_SEEDS if wide else SEEDS):
        random, world = Random(seed), start_of(name, seed)
        for _ in range(CASES[name].steps):
            if not (moves := next_moves(world, random, CASES[name].kinds)):
                break
            move = random.choice(moves)
            after = step(world, move)
            if after.now > world.now + SLOW and any(map(is_busy, world.agents)):
                continue  # an agent that is so slow counts as lost: not the subject here
            assert not (wrong := broken_invariants(world, move, after)), f"seed {seed}: {move}: {wrong}"
            world = after
        wrong = smaller_than_its_target(world) or liveness_violation(world, 4000)
        assert not wrong, f"seed {seed}: {wrong}"


def is_busy(a: Agent) -> bool:
    """Return whether an agent has messages to send or to read, or workers to stop."""
    return a.ended is None and (a.store is None or bool(a.inbox or a.outbox) or a.stopping)


def smaller_than_its_target(world: World, limit: int = 1000) -> str:
    """Return why the job does not train with all agents of its target when no more faults occur.

    Empty if it does, or has ended.
    """
    for number in range(limit):
        running = (s.state.round for s in world.serving if s.state.round is not None and s.state.round.formed_at)
        if world.declared is not None or any(r.ending is None and len(r.members) == world.wanted for r in running):
            return ""
        moves = [m for m in calm(world) if m[0] != "tick"] or list(calm(world))
        if not moves:
            break
        world = step(world, moves[number % len(moves)])
    return f"after {limit} calm moves, no round of {world.wanted} nodes runs"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("step", ("crash",)), ("step", ("target",)), ("fail-job", ("exit",)), ("ignore", ("crash",)),
        ("recreate", ("fail",)), ("recreate", ("fail", "blip")), ("any", ("succeed",)), ("any", ("succeed", "fail")),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)  # fmt: skip
def test_interleavings_around_faults_of_a_job_with_options(name: str, kinds: tuple[str, ...], wide: bool) -> None:
    assert not explore(start_of(name), kinds, len(kinds), WIDE_STATES if wide else STATES)


def test_a_round_does_not_end_for_joining_nodes_that_are_too_few_for_the_next_size() -> None:
    """Of four agents one is lost, and the imports of its successor take long: two train, and one waits for it."""
    world = settle(step(start_of("step"), ("crash", 3)), but=("tick", "warm"))
    while moves := [m for m in calm(world) if m[0] != "warm"]:
        after = step(world, moves[0])
        assert not (wrong := broken_invariants(world, moves[0], after)), wrong
        world = after
    assert [len(s.state.round.members) for s in world.stores if s.state.round] == [2]
    assert not smaller_than_its_target(world)


def test_after_a_success_that_is_enough_no_node_runs_again_before_the_operator_has_answered() -> None:
    """With successPolicy Any, an agent has received the success. Then the store forgets it, and no operator is
    there."""
    world = start_of("any")
    for move in (("succeed", 0), ("up", 0), ("down", 0), ("operator-down", 0), ("restart-in-place", 0)):
        world = step(world, move)
    assert world.agent(0).ended is Outcome.SUCCEEDED
    while moves := [m for m in calm(world) if m[0] != "operator-up"]:
        after = step(world, moves[0])
        assert not (wrong := broken_invariants(world, moves[0], after)), wrong
        world = after
    assert not liveness_violation(world)
    assert {a.ended for a in world.agents} <= {None, Outcome.SUCCEEDED}
