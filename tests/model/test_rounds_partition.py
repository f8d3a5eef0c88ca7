"""Walks through networks that part the agents again and again: no two rounds may write."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from random import Random
from types import ModuleType

import pytest

from elasticjob._runtime.agent.state_machine.round import write_permission
from elasticjob._runtime.contract.messages import Report
from elasticjob_operator.plan.store_pods import store_confirmation
from support.rendezvous.rounds_invariants import (
    INVARIANTS,
    Invariant,
    broken_invariants,
    liveness_violation,
    never_two_writers,
)
from support.rendezvous.rounds_world import Move, World, calm, faults, running, step

SEEDS, WIDE_SEEDS, STEPS = 60, 1500, 160
OTHER_FAULTS = ("crash", "sigterm", "target")
WEIGHTS = {"old-store-ends": 1, "turn": 3, "resume": 3, "tick": 3}


def moves_of(world: World, random: Random) -> list[Move]:
    """Return the moves to choose from: partitions last long, and are half of all faults."""
    if random.random() < 0.05:
        return list(faults(world, ("partition",) if random.random() < 0.5 else OTHER_FAULTS))
    healing = random.random() < 0.03
    return [m for m in calm(world) if m[0] != "heal" or healing for _ in range(WEIGHTS.get(m[0], 9))]


def violation(seeds: int, sizes: Sequence[int] = (3, 4, 5), invariants: Sequence[Invariant] = INVARIANTS) -> str:
    """Return what breaks in walks of jobs of these sizes; empty if nothing does."""
    for seed in range(seeds):
        random, world = Random(seed), running(sizes[seed % len(sizes)], spares=seed % 2)
        for _ in range(STEPS):
            if not (moves := moves_of(world, random)):
                continue
            move = random.choice(moves)
            after = step(world, move)
            if wrong := broken_invariants(world, move, after, invariants):
                return f"seed {seed}: {move}: {wrong}"
            world = after
        if wrong := liveness_violation(world, 4000, invariants):
            return f"seed {seed}: {wrong}"
    return ""


def test_no_two_rounds_may_write_in_a_network_that_is_parted(wide: bool) -> None:
    assert not violation(WIDE_SEEDS if wide else SEEDS)


def _any_link_is_enough(group_rank: int, group_world_size: int, *, nodes: Mapping[int, float]) -> float:
    """Wrong: group rank 0 goes on with any other agent."""
    return math.inf if group_world_size == 1 else max(nodes.values(), default=-math.inf)


def _live_pods_do_not_matter(
    report: Report, before: Report | None, *, older: bool, live: Collection[str], standby: bool = False
) -> float:
    """Wrong: confirm a store although more than half of the last round may go on without it."""
    return _confirmable_request(report, before, older=older, live=(), standby=standby)


_confirmable_request = store_confirmation.confirmable_request


@pytest.mark.long_walk
@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (write_permission, "permission_end", _any_link_is_enough),
        (store_confirmation, "confirmable_request", _live_pods_do_not_matter),
    ],
)
def test_a_second_writer_is_found(
    module: ModuleType, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert "never_two_writers" in violation(10 * SEEDS, sizes=(4,), invariants=(never_two_writers,))
