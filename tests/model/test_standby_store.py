"""Interleavings of small jobs with a standby store, breadth first, random walks, and seeded bugs that must be found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import ModuleType

import pytest

from elasticjob._runtime.rendezvous import standby_store
from elasticjob._runtime.rendezvous.rounds.starts import confirmation
from elasticjob._runtime.rendezvous.state import RECOVERY_TIMEOUT, CoordinatorState
from elasticjob._runtime.rendezvous.store_recovery import count_newest_round
from elasticjob_operator.plan.context import LEASE_LATE_SECONDS
from elasticjob_operator.plan.store_pods import standby, store_confirmation
from support.rendezvous import rounds_world
from support.rendezvous.rounds_agent import Agent
from support.rendezvous.rounds_explorer import explore
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_operator import MIN, node_of
from support.rendezvous.rounds_world import (
    STANDBY_FAULTS,
    Store,
    World,
    calm,
    continued_without,
    faults,
    moved_to_standby,
    settle,
    step,
    with_standby,
)

STATES, WIDE_STATES = 900, 20_000
WALKS, WIDE_WALKS, STEPS = 60, 3000, 250


@pytest.mark.parametrize("kind", STANDBY_FAULTS)
def test_interleavings_around_one_fault_with_a_standby_store(kind: str, wide: bool) -> None:
    assert not explore(with_standby(), (kind,), 1, WIDE_STATES if wide else STATES)


DEFAULT_PAIRS = [
    ("restart-store", "crash"), ("restart-store", "restart-standby"), ("cut-store", "operator-down"),
    ("second-store", "cut-store"), ("restart-in-place", "cut-store"), ("kill-standby", "restart-store"),
    ("cut-store", "fail"),
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over all pairs of faults with `--wide`, else over some."""
    if "pair" in metafunc.fixturenames:
        wide = metafunc.config.getoption("--wide", default=False)
        pairs = list(itertools.combinations(STANDBY_FAULTS, 2)) if wide else DEFAULT_PAIRS
        metafunc.parametrize("pair", pairs, ids="+".join)


@pytest.mark.long_walk
def test_interleavings_around_two_faults_with_a_standby_store(pair: tuple[str, str], wide: bool) -> None:
    assert not explore(with_standby(4), pair, 2, WIDE_STATES if wide else STATES)


STARTS = (3, 4, 5, 6)
"""Sizes of the jobs that the walks begin with."""


def start_of(seed: int) -> World:
    """Return the world in which a walk begins: a quiet one, one without its store, or one whose agents are divided."""
    size = STARTS[seed % len(STARTS)]
    moved = tuple(range(size - size // 2 - seed % 2, size))
    if seed % 7 == 4:
        return step(with_standby(size), ("restart-store", 0))
    if seed % 7 == 5:
        return moved_to_standby(size, moved)
    if seed % 7 == 6 and size - len(moved) >= MIN:
        return continued_without(size, moved)
    return with_standby(size, spares=seed % 5 // 4)


def walk(seed: int, kinds: tuple[str, ...], reached: set[str], steps: int = STEPS) -> str:
    """Return what a random walk breaks; empty if nothing."""
    random, world = Random(seed), start_of(seed)
    for _ in range(steps):
        moves = list(faults(world, kinds)) if random.random() < 0.08 else []
        moves = moves or [m for m in calm(world) for _ in range(_weight(m[0]))]
        if not moves:
            break
        move = random.choice(moves)
        after = step(world, move)
        if move[0] == "old-store-ends" and random.random() < 0.8:
            continue
        if after.now > world.now + RECOVERY_TIMEOUT and any(a.inbox or a.stopping for a in world.agents):
            continue  # the tick would make a slow agent count as lost: not the subject here
        if wrong := broken_invariants(world, move, after):
            return f"seed {seed}: {move}: {wrong}"
        reached |= _events(world, after)
        world = after
    wrong = liveness_violation(world, 5000)
    return f"seed {seed}: {wrong}" if wrong else ""


def _weight(move: str) -> int:
    return {"old-store-ends": 1, "heal": 2, "resume": 3, "tick": 3}.get(move, 9)


def _events(before: World, after: World) -> set[str]:
    """Return what a step shows of the standby store's life."""
    passive = {s.incarnation for s in before.stores if s.state.passive}
    events = set()
    for store in after.stores:
        if store.incarnation in passive and not store.state.passive:
            events |= {"promoted" if store.state.operator_view.serving == store.incarnation else "took over"}
        if store.state.took_over and store.state.round is not None:
            events |= {"formed" if store.state.round.id.store_incarnation == store.incarnation else "restored"}
        events |= {"retired"} if store.state.retired else set()
        events |= {"confirmed for half"} if store.state.confirmed_half else set()
    waited = {a.number: a.store for a in before.agents if a.passive}
    for a in after.agents:
        events |= {"went back"} if a.store is not None and waited.get(a.number, a.store) != a.store else set()
    return events


GROUPS = ("cut-store", "cut-store", "cut-store", "blip", "cut", "crash", "delay-view", "operator-down")
"""Faults of which several together separate a part of the agents from the store."""


@pytest.mark.long_walk
@pytest.mark.parametrize("kinds", [STANDBY_FAULTS, GROUPS], ids=["all", "groups"])
def test_invariants_hold_with_a_standby_store_and_the_job_ends(kinds: tuple[str, ...], wide: bool) -> None:
    for seed in range(WIDE_WALKS if wide else WALKS):
        assert not walk(seed, kinds, set())


def test_the_walks_reach_all_that_can_happen_to_a_standby_store() -> None:
    wanted = {"promoted", "took over", "formed", "restored", "retired", "confirmed for half", "went back"}
    reached = set[str]()
    for kinds, seed in itertools.product((STANDBY_FAULTS, GROUPS), range(WALKS)):
        walk(seed, kinds, reached, 150)
        if reached == wanted:
            break
    assert reached == wanted


# ---- the exploration finds seeded bugs


def _half_is_enough(state: CoordinatorState) -> bool:
    """Wrong: take over with exactly half of the newest round."""
    connected, size = count_newest_round(state)
    return connected > 0 and 2 * connected >= size


def _never(*_: object) -> bool:
    """Wrong: confirm the present store although agents can go to a standby store."""
    return False


def _raised_by_a_passive_store(a: Agent, store: Store) -> int:
    """Wrong: an agent that waits at a passive standby store closes the present one when it returns."""
    return store.incarnation


def _half_holds_for_any(state: CoordinatorState, now: float) -> bool:
    """Wrong: a confirmation for half of the agents holds for any number of missing ones."""
    return _needs_confirmation(replace(state, confirmed_half=False), now)


_needs_confirmation = confirmation.needs_confirmation


@pytest.mark.parametrize(
    ("module", "name", "wrong", "found"),
    [
        (standby_store, "has_majority", _half_is_enough, "a_standby_store_takes_over_with_a_majority"),
        (rounds_world, "newest_store", _raised_by_a_passive_store, "only_a_store_that_was_active_closes_another"),
    ],
)
def test_a_seeded_bug_is_found_by_walks(
    module: ModuleType, name: str, wrong: object, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    broken = (walk(seed, GROUPS, set()) for seed in range(WALKS))
    assert found in next(filter(None, broken), "")


Moves = tuple[tuple[str, int], ...]
ISOLATED = ("tick", "heal", "connect-standby", "kubelet")
"""Moves that would bring separated agents to a store, or end them."""


def majority_leaves() -> tuple[World, Moves]:
    """Most agents reach neither the store nor, with their kubelets, the API server. The store continues, if it is
    confirmed, and then they find the standby store."""
    world = with_standby(5)
    for index in (2, 3, 4):
        world = step(world, ("cut-store", index))
    silent = tuple((node_of(world.agent(index)), world.now - LEASE_LATE_SECONDS) for index in (2, 3, 4))
    world = settle(step(replace(world, lost_nodes=silent), ("tick", 0)), but=(*ISOLATED, "old-store-ends"))
    return world, tuple((move, index) for index in (2, 3, 4) for move in ("connect-standby", "up"))


def half_leaves_then_one_more() -> tuple[World, Moves]:
    """Half of the agents wait at the standby store. One more goes there after the operator has confirmed the store."""
    world = settle(step(moved_to_standby(6, (3, 4, 5)), ("tick", 0)), but=(*ISOLATED, "reconcile"))
    world = step(step(step(world, ("delay-view", 0)), ("reconcile", 0)), ("cut-store", 2))
    world = settle(step(world, ("view-arrives", 0)), but=(*ISOLATED, "reconcile"))
    return world, (("connect-standby", 2), ("up", 2))


def old_majority_returns() -> tuple[World, Moves]:
    """The store was confirmed without most agents. They hear of the new standby store, and go there."""
    world = continued_without(5, (2, 3, 4))
    number = world.standby.incarnation if world.standby is not None else -1
    agents = (replace(a, standby=number) if a.number in (2, 3, 4) else a for a in world.agents)
    world = replace(world, agents=tuple(agents))
    return world, tuple((move, index) for index in (2, 3, 4) for move in ("connect-standby", "up"))


OUTDATED = (CoordinatorState, "is_outdated", lambda state, round_id: False)
"""Wrong: forget that the operator knows a newer round."""


def violation(world: World, moves: Moves) -> str:
    """Return the invariants that break in these moves, or when the operator then does nothing for a while."""
    broken: dict[str, None] = {}
    late = ("tick", "heal", "reconcile", "old-store-ends", "connect", "view-arrives", "kubelet")
    for number in range(400):
        calm_moves = [m for m in calm(world) if m[0] not in late] or [("tick", 0)]
        move = moves[number] if number < len(moves) else calm_moves[0]
        if number >= len(moves) and move[0] == "tick" and all(m[0] != "tick" for m in calm(world)):
            break
        after = step(world, move)
        broken[broken_invariants(world, move, after)] = None
        world = after
    return " ".join(broken).strip()


@pytest.mark.parametrize("situation", [majority_leaves, half_leaves_then_one_more, old_majority_returns])
def test_a_second_world_is_prevented(situation: Callable[[], tuple[World, Moves]]) -> None:
    assert not violation(*situation())


@pytest.mark.parametrize(
    ("situation", "patches", "found"),
    [
        (
            majority_leaves,
            [(standby, "must_retire", _never), (store_confirmation, "_standby_may_act", _never), OUTDATED],
            "never_two_running_worlds",
        ),
        (
            half_leaves_then_one_more,
            [(confirmation, "needs_confirmation", _half_holds_for_any)],
            "never_two_running_worlds",
        ),
        (old_majority_returns, [OUTDATED], "a_standby_store_takes_over_with_a_majority"),
    ],
)
def test_a_second_world_that_no_rule_prevents_is_found(
    situation: Callable[[], tuple[World, Moves]],
    patches: list[tuple[object, str, object]],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name, wrong in patches:
        monkeypatch.setattr(module, name, wrong)
    assert found in violation(*situation())
