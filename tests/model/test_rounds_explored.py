"""Long seeded random walks through the worlds of `rounds_world`, with all faults; they must reach all phases."""

from __future__ import annotations

from random import Random
from types import ModuleType

import pytest

from elasticjob.contract.messages import EndReason, Report, RoundPhase
from elasticjob.rendezvous.report import build_report
from elasticjob.rendezvous.state import RECOVERY_TIMEOUT
from elasticjob_operator.plan import stores
from support import rounds_world
from support.rounds_invariants import broken_invariants, liveness_violation
from support.rounds_world import World, calm, faults, finishing, running, step, two_stores, with_standby

SEEDS, STEPS = 60, 250


def next_world(world: World, random: Random) -> World:
    """Return the world after a random move: a fault in 6 % of the cases, else mostly messages and work."""
    moves = list(faults(world)) if random.random() < 0.06 else [m for m in calm(world) for _ in range(_weight(m[0]))]
    if not moves:
        return world
    move = random.choice(moves)
    after = step(world, move)
    assert not broken_invariants(world, move, after), f"{move}: {broken_invariants(world, move, after)}"
    return after


def _weight(move: str) -> int:
    return {"old-store-ends": 1, "heal": 3, "resume": 3, "tick": 3}.get(move, 9)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_invariants_hold_and_the_job_ends_once_faults_stop(seed: int) -> None:
    random, world = Random(seed), running(3 + seed % 2, spares=seed % 3 // 2) if seed % 10 else finishing()
    for _ in range(STEPS):
        world = next_world(world, random)
    assert not liveness_violation(world, 4000)


TWO_STORES = [(5, (3, 4), False), (4, (2, 3), False), (4, (2, 3), True), (5, (2, 3, 4), False), (6, (3, 4, 5), True),
              (5, (2, 3, 4), True)]  # fmt: skip


def two_store_violation(size: int, moved: tuple[int, ...], confirmed: bool, seeds: int) -> str:
    """Return what breaks while two stores run, nodes move between them, and the operator answers the newer one."""
    for seed in range(seeds):
        random, world = Random(seed), two_stores(size, moved, confirmed=confirmed)
        for _ in range(120):
            kinds = ("blip", "cut", "crash") if random.random() < 0.03 else ()
            moves = list(faults(world, kinds)) or [m for m in calm(world) for _ in range(_weight(m[0]))]
            if not moves:
                break
            move = random.choice(moves)
            if move[0] == "old-store-ends" and random.random() < 0.9:
                continue
            after = step(world, move)
            if after.now > world.now + RECOVERY_TIMEOUT and any(a.inbox or a.stopping for a in world.agents):
                continue  # the tick would make a slow node count as lost: not the subject here
            if wrong := broken_invariants(world, move, after):
                return f"seed {seed}: {move}: {wrong}"
            world = after
        if wrong := liveness_violation(world, 4000):
            return f"seed {seed}: {wrong}"
    return ""


@pytest.mark.parametrize(("size", "moved", "confirmed"), TWO_STORES)
def test_a_replaced_store_that_is_still_alive_runs_no_second_world(
    size: int, moved: tuple[int, ...], confirmed: bool, deep: bool
) -> None:
    assert not two_store_violation(size, moved, confirmed, 1000 if deep else 25)


def _confirm_at_once(report: Report, before: Report | None, *, older: bool, standby: bool = False) -> float:
    """Wrong: confirm a successor even while an older store is alive."""
    return report.confirmation_request


def _confirm_any_half(report: Report, before: Report | None, *, older: bool, standby: bool = False) -> float:
    """Wrong: confirm a successor with half of the nodes, even if the older store may have been confirmed."""
    return report.confirmation_request if report.half_missing_round or not older else 0.0


def _ignore_nodes_on_their_way(world: World) -> bool:
    """Wrong: confirm a successor once the older store has ended, although nodes of that one still train."""
    return len(world.stores) > 1


@pytest.mark.parametrize(
    ("module", "name", "wrong", "start"),
    [
        (stores, "confirmable_request", _confirm_at_once, TWO_STORES[0]),
        (stores, "confirmable_request", _confirm_any_half, TWO_STORES[2]),
        (rounds_world, "_older", _ignore_nodes_on_their_way, TWO_STORES[0]),
    ],
)
def test_a_confirmation_too_many_is_found(
    module: ModuleType, name: str, wrong: object, start: tuple[int, tuple[int, ...], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(stores, "formed_round", lambda report: None)  # it prevents the same
    assert "never_two_running_worlds" in two_store_violation(*start, 100)


def test_the_walks_reach_every_phase_and_end_reason() -> None:
    """The walks check nothing that they never reach."""
    reached: set[str] = set()
    for seed in range(SEEDS):
        random, world = Random(seed), running(3 + seed % 2) if seed % 10 else finishing()
        if seed % 10 == 5:
            # A node that has met the successor finds the older store again: few walks get there by themselves.
            world = step(step(two_stores(5, (3, 4), confirmed=False), ("blip", 3)), ("connect-old", 3))
        world = with_standby() if seed % 10 == 6 else world
        for _ in range(STEPS):
            world = next_world(world, random)
            for store in world.stores:
                report = build_report(store.state, world.now)
                reached |= {report.phase.value, *(e.reason.value for e in report.ended_rounds)}
                reached |= {"requested"} if report.confirmation_request else set()
                reached |= {"closed"} if store.state.newer_store is not None else set()
                restored = store.state.round and store.state.round.id.store_incarnation < store.incarnation
                reached |= {"restored"} if restored else set()
            reached |= {"frozen" for a in world.agents if a.frozen}
    wanted = {p.value for p in RoundPhase} | {e.value for e in EndReason}
    wanted |= {"restored", "requested", "closed", "frozen"}
    missed = wanted - reached
    assert not missed, sorted(missed)
