"""Long seeded walks through the worlds of `rounds_world`, with every fault there is; and that they get everywhere."""

from __future__ import annotations

from random import Random

import pytest

from elasticjob.contract.messages import EndReason, RoundPhase
from elasticjob.rendezvous import view
from support.rounds_invariants import broken, left_out_for_ever
from support.rounds_world import World, calm, faults, finishing, running, step

SEEDS, STEPS = 60, 250


def next_world(world: World, random: Random) -> World:
    """A fault now and then, else whatever comes; moves that matter more often than the clock."""
    moves = list(faults(world)) if random.random() < 0.06 else [m for m in calm(world) for _ in range(_weight(m[0]))]
    if not moves:
        return world
    move = random.choice(moves)
    after = step(world, move)
    assert not broken(world, move, after), f"{move}: {broken(world, move, after)}"
    return after


def _weight(move: str) -> int:
    return {"old-store-dies": 1, "heal": 3, "resume": 3, "tick": 3}.get(move, 9)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_goes_wrong_and_the_job_ends_once_faults_stop(seed: int) -> None:
    random, world = Random(seed), running(3 + seed % 2, spares=seed % 3 // 2) if seed % 10 else finishing()
    for _ in range(STEPS):
        world = next_world(world, random)
    assert not left_out_for_ever(world, 4000)


def test_the_exploration_gets_everywhere() -> None:
    """What random walks never reach they cannot check."""
    reached: set[str] = set()
    for seed in range(SEEDS):
        random, world = Random(seed), running(3 + seed % 2)
        for _ in range(STEPS):
            world = next_world(world, random)
            for store in world.stores:
                report = view.report(store.state, world.now)
                reached |= {report.phase.value, *(e.reason.value for e in report.ended)}
                reached |= {"asked"} if report.asks else set()
                reached |= {"closed"} if store.state.newer_store is not None else set()
                restored = store.state.round and store.state.round.id.store < store.incarnation
                reached |= {"restored"} if restored else set()
            reached |= {"frozen" for a in world.agents if a.frozen}
    wanted = {p.value for p in RoundPhase} | {e.value for e in EndReason} | {"restored", "asked", "closed", "frozen"}
    missed = wanted - reached
    assert not missed, sorted(missed)
