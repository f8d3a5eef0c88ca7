"""Long seeded random walks through the worlds of `rounds_world`, with all faults; they must reach all phases."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random
from types import ModuleType

import pytest

from elasticjob._runtime.agent.state_machine import decide
from elasticjob._runtime.contract.messages import EndReason, Report, RoundPhase
from elasticjob._runtime.rendezvous.observations.report import build_report
from elasticjob._runtime.rendezvous.state import RECOVERY_TIMEOUT, CoordinatorState
from elasticjob_operator.plan.store_pods import store_confirmation
from support.rendezvous import rounds_world
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_operator import MIN
from support.rendezvous.rounds_world import (
    BUDGET,
    World,
    calm,
    faults,
    finishing,
    running,
    step,
    two_stores,
    with_standby,
)

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
    return {"old-store-ends": 1, "turn": 3, "heal": 3, "resume": 3, "tick": 3}.get(move, 9)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_invariants_hold_and_the_job_ends_once_faults_stop(seed: int) -> None:
    random, world = Random(seed), start_of(seed)
    for _ in range(STEPS):
        world = next_world(world, random)
    assert not liveness_violation(world, 4000)


def test_a_node_that_stays_frozen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: only the repeated assignment continues frozen workers, not an end that is planned."""
    monkeypatch.setattr(decide, "continue_frozen", lambda state, _: decide.AgentDecision(state))
    with pytest.raises(AssertionError, match="a_node_that_has_its_answer_is_not_frozen"):
        any(map(test_invariants_hold_and_the_job_ends_once_faults_stop, range(SEEDS)))


def start_of(seed: int) -> World:
    """Return the world in which a walk starts: of different sizes, scripts and stores."""
    budget = 2 if seed % 6 == 5 else BUDGET
    world = running(3 + seed % 2, seed % 3 // 2, budget, workers=1 + seed % 7 // 6) if seed % 10 else finishing()
    return replace(world, batched=seed % 4 == 1, reports_steps=seed % 5 != 2, backoff=4 * (seed % 3 == 1))


CHARGES = (
    *["fail"] * 4,
    "collective",
    "collective",
    "crash",
    "vanish",
    "blip",
    "sigterm",
    "restart-store",
    "restart-in-place",
)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_charges_and_budgets_are_exact(first: int) -> None:
    """Walks with failure after failure, and small budgets: most of them use the budget up."""
    for seed in range(first, first + 20):
        random, world = Random(seed), running(2 + seed % 3, budget=1 + seed % 3)
        world = replace(world, batched=seed % 5 == 1)
        for _ in range(120):
            moves = list(faults(world, CHARGES)) if random.random() < 0.12 else []
            moves = moves or [m for m in calm(world) if m[0] != "tick" or random.random() < 0.3] or list(calm(world))
            if not moves:
                continue
            move = random.choice(moves)
            after = step(world, move)
            assert not (wrong := broken_invariants(world, move, after)), f"seed {seed}: {move}: {wrong}"
            world = after
        assert not liveness_violation(world, 4000), seed


TWO_STORES = [(5, (3, 4), False), (4, (2, 3), False), (4, (2, 3), True), (5, (2, 3, 4), False), (6, (3, 4, 5), True)]


def two_store_violation(size: int, moved: tuple[int, ...], confirmed: bool, seeds: int) -> str:
    """Return what breaks while two stores run, agents move between them, and the operator answers the newer one."""
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
                continue  # the tick would make a slow agent count as lost: not the subject here
            if wrong := broken_invariants(world, move, after):
                return f"seed {seed}: {move}: {wrong}"
            world = after
        if wrong := liveness_violation(world, 4000):
            return f"seed {seed}: {wrong}"
    return ""


@pytest.mark.parametrize(("size", "moved", "confirmed"), TWO_STORES)
def test_a_replaced_store_that_is_still_alive_runs_no_second_world(
    size: int, moved: tuple[int, ...], confirmed: bool, wide: bool
) -> None:
    assert not two_store_violation(size, moved, confirmed, 1000 if wide else 25)


def _confirm_at_once(
    report: Report, before: Report | None, *, older: bool, live: Collection[str], standby: bool = False
) -> float:
    """Wrong: confirm a successor even while an older store is alive."""
    return report.confirmation_request


def _confirm_any_half(
    report: Report, before: Report | None, *, older: bool, live: Collection[str], standby: bool = False
) -> float:
    """Wrong: confirm a successor with half of the agents, even if the older store may have been confirmed."""
    return report.confirmation_request if report.half_missing_round or not older else 0.0


def _ignore_nodes_on_their_way(
    report: Report, before: Report | None, *, older: bool, live: Collection[str], standby: bool = False
) -> float:
    """Wrong: confirm a successor once the older store has ended, although agents of that one still train."""
    return _CONFIRMABLE(report, before, older=older, live=(), standby=standby)


_CONFIRMABLE = store_confirmation.confirmable_request


def _without_time_to_connect(world: World) -> bool:
    """Wrong: give agents no time to connect to a successor once the older store has ended."""
    return len(world.stores) > 1


@pytest.mark.parametrize(
    ("wrong", "start"),
    [
        ([(store_confirmation, "confirmable_request", _confirm_at_once)], TWO_STORES[0]),
        ([(store_confirmation, "confirmable_request", _confirm_any_half)], TWO_STORES[2]),
        (
            [
                (store_confirmation, "confirmable_request", _ignore_nodes_on_their_way),
                (store_confirmation, "AGENTS_SWITCH_SECONDS", 0.001),
                (rounds_world, "_older", _without_time_to_connect),
            ],
            TWO_STORES[0],
        ),
    ],
)
def test_a_confirmation_too_many_is_found(
    wrong: list[tuple[ModuleType, str, object]], start: tuple[int, tuple[int, ...], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # A successor that hears of no agent of the newest round needs a confirmation too: it prevents the same.
    monkeypatch.setattr(CoordinatorState, "is_outdated", lambda state, round_id: False)
    for module, name, value in wrong:
        monkeypatch.setattr(module, name, value)
    found = two_store_violation(*start, 100)
    assert "never_two_writers" in found or "never_two_running_worlds" in found


def test_the_walks_reach_every_phase_and_end_reason() -> None:
    """The walks check nothing that they never reach. Those that begin in a rare situation come first.

    `test_rounds_code` has the walks in which a job is given other code.
    """
    wanted = {p.value for p in RoundPhase} | {e.value for e in EndReason} - {EndReason.CODE_UPDATED.value}
    wanted |= {"restored", "requested", "closed", "frozen"}
    reached: set[str] = set()
    rare = 6 * (with_standby(),) + 12 * (step(running(4), ("target", MIN)),)
    for seed in (*range(SEEDS, SEEDS + len(rare)), *range(SEEDS)):
        if wanted <= reached:
            break
        random, world = Random(seed), start_of(seed) if seed < SEEDS else rare[seed - SEEDS]
        if seed % 10 == 5 and seed < SEEDS:
            # An agent that has met the successor finds the older store again: few walks get there by themselves.
            world = step(step(two_stores(5, (3, 4), confirmed=False), ("blip", 3)), ("connect-old", 3))
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
    missed = wanted - reached
    assert not missed, sorted(missed)
