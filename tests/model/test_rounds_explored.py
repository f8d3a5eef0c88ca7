"""Long seeded walks through the worlds of `rounds_world`, with every fault there is; and that they get everywhere."""

from __future__ import annotations

from random import Random
from types import ModuleType

import pytest

from elasticjob.contract.messages import EndReason, Report, RoundPhase
from elasticjob.rendezvous.report import build_report
from elasticjob.rendezvous.state import RECOVERY_TIMEOUT
from elasticjob_operator.plan import stores
from support import rounds_world
from support.rounds_invariants import broken, left_out_for_ever
from support.rounds_world import World, calm, faults, finishing, parted, running, step

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


PARTED = [(5, (3, 4), False), (4, (2, 3), False), (4, (2, 3), True), (5, (2, 3, 4), False), (6, (3, 4, 5), True)]


def parted_ways(size: int, there: tuple[int, ...], by_word: bool, seeds: int) -> str:
    """What breaks while two stores live, nodes go from one to the other, and the operator answers the newer one."""
    for seed in range(seeds):
        random, world = Random(seed), parted(size, there, by_word=by_word)
        for _ in range(120):
            kinds = ("blip", "cut", "crash") if random.random() < 0.03 else ()
            moves = list(faults(world, kinds)) or [m for m in calm(world) for _ in range(_weight(m[0]))]
            if not moves:
                break
            move = random.choice(moves)
            if move[0] == "old-store-dies" and random.random() < 0.9:
                continue
            after = step(world, move)
            if after.now > world.now + RECOVERY_TIMEOUT and any(a.inbox or a.stopping for a in world.agents):
                continue  # whoever stands still for half a minute is given up: not what this is about
            if wrong := broken(world, move, after):
                return f"seed {seed}: {move}: {wrong}"
            world = after
        if wrong := left_out_for_ever(world, 4000):
            return f"seed {seed}: {wrong}"
    return ""


@pytest.mark.parametrize(("size", "there", "by_word"), PARTED)
def test_a_store_that_was_given_up_and_lives_makes_no_second_world(
    size: int, there: tuple[int, ...], by_word: bool, deep: bool
) -> None:
    assert not parted_ways(size, there, by_word, 1000 if deep else 25)


def _word_at_once(report: Report, before: Report | None, *, older: bool) -> float:
    """A successor is the only store from its first moment on."""
    return report.confirmation_request


def _half_is_enough(report: Report, before: Report | None, *, older: bool) -> float:
    """... if half is here, whatever the old store was told."""
    return report.confirmation_request if report.half_missing_round or not older else 0.0


def _nobody_on_the_way(world: World) -> bool:
    """... from when the old one is gone, though its nodes train on until they come."""
    return len(world.stores) > 1


@pytest.mark.parametrize(
    ("module", "name", "wrong", "start"),
    [
        (stores, "confirmable_request", _word_at_once, PARTED[0]),
        (stores, "confirmable_request", _half_is_enough, PARTED[2]),
        (rounds_world, "_older", _nobody_on_the_way, PARTED[0]),
    ],
)
def test_a_word_too_many_is_found(
    module: ModuleType, name: str, wrong: object, start: tuple[int, tuple[int, ...], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, wrong)
    assert "never_two_running_worlds" in parted_ways(*start, 100)


def test_the_exploration_gets_everywhere() -> None:
    """What random walks never reach they cannot check."""
    reached: set[str] = set()
    for seed in range(SEEDS):
        random, world = Random(seed), running(3 + seed % 2) if seed % 10 else finishing()
        for _ in range(STEPS):
            world = next_world(world, random)
            for store in world.stores:
                report = build_report(store.state, world.now)
                reached |= {report.phase.value, *(e.reason.value for e in report.ended_rounds)}
                reached |= {"asked"} if report.confirmation_request else set()
                reached |= {"closed"} if store.state.newer_store is not None else set()
                restored = store.state.round and store.state.round.id.store_incarnation < store.incarnation
                reached |= {"restored"} if restored else set()
            reached |= {"frozen" for a in world.agents if a.frozen}
    wanted = {p.value for p in RoundPhase} | {e.value for e in EndReason} | {"restored", "asked", "closed", "frozen"}
    missed = wanted - reached
    assert not missed, sorted(missed)
