"""Interleavings of small jobs around one or two faults, breadth first, and seeded bugs that must be found.

The search is bounded: it explores all interleavings up to some depth. `Search` says how far it came, and whether it
came to an end; the names of the tests claim no more.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob._runtime.contract.messages import OperatorView, WorkersStopped
from elasticjob._runtime.rendezvous.decision import RoundDecision, Rule
from elasticjob._runtime.rendezvous.event_handlers import agent_messages, apply_event, operator_views
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.rounds.ends import round_conclusion
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent
from support.rendezvous.rounds_agent import INCARNATIONS
from support.rendezvous.rounds_explorer import explore, search
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_world import FAULTS, Move, World, calm, charged, faults, finishing, running, settle, step

STATES, WIDE_STATES = 900, 20_000
"""Different worlds explored around each fault."""


@pytest.mark.parametrize("kind", FAULTS)
def test_interleavings_around_one_fault(kind: str, wide: bool) -> None:
    assert not explore(running(), (kind,), 1, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("kind", ["fail", "crash", "sigterm", "target", "half-open", "restart-in-place"])
def test_interleavings_around_one_fault_with_batches(kind: str, wide: bool) -> None:
    start = replace(running(), batched=True)
    assert not explore(start, (kind,), 1, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("kind", ["crash", "sigterm", "target", "blip"])
def test_interleavings_around_one_fault_with_a_spare(kind: str, wide: bool) -> None:
    assert not explore(running(4, spares=1), (kind,), 1, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("kind", ["target", "sigterm", "succeed"])
def test_interleavings_around_one_fault_of_a_script_that_reports_no_steps(kind: str, wide: bool) -> None:
    start = replace(running(workers=2), reports_steps=False)
    assert not explore(start, (kind,), 1, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("budget", [1, 2])
def test_interleavings_around_the_last_restart(budget: int, wide: bool) -> None:
    """One restart was charged already: with a budget of 1 the next failure ends the job, with 2 the one after it."""
    assert not explore(running(2, budget=budget), ("fail",), 2, WIDE_STATES if wide else STATES)


DEFAULT_PAIRS = [
    ("fail", "cut"), ("blip", "second-store"), ("succeed", "restart-store"), ("crash", "operator-down"),
    ("fail", "restart-store"), ("fail", "restart-in-place"),
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over all pairs of faults with `--wide`, else over some."""
    if "pair" in metafunc.fixturenames:
        wide = metafunc.config.getoption("--wide", default=False)
        metafunc.parametrize("pair", list(itertools.combinations(FAULTS, 2)) if wide else DEFAULT_PAIRS, ids="+".join)


def test_interleavings_around_two_faults(pair: tuple[str, str], wide: bool) -> None:
    assert not explore(running(), pair, 2, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("kinds", [("restart-store",), ("second-store", "cut"), ("restart-store", "operator-down")])
def test_interleavings_around_a_success_while_the_store_dies(kinds: tuple[str, ...], wide: bool) -> None:
    assert not explore(finishing(), kinds, len(kinds), WIDE_STATES if wide else 2 * STATES)


def test_interleavings_around_a_success_that_only_the_operator_can_find(wide: bool) -> None:
    """One agent has received the success; the store has forgotten it, and the operator is away for some time."""
    start = step(step(finishing(), ("operator-down", 0)), ("restart-in-place", 0))
    assert not explore(start, (), 0, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("lost", ["vanish", "cut"])
def test_interleavings_around_a_collective_that_a_lost_node_broke(lost: str, wide: bool) -> None:
    assert not explore(step(running(), (lost, 2)), ("collective",), 1, WIDE_STATES if wide else STATES)


def late_confirmation() -> World:
    """Half of the agents have crashed. The operator's confirmation is late: the store has renewed its request since."""
    held = ("tick", "reconcile", "view-arrives", "heal", "kubelet", "connect", "warm")
    world = settle(step(step(running(4), ("crash", 2)), ("crash", 3)), but=held)
    world = settle(step(world, ("tick", 0)), but=held)
    while (
        not (late := step(step(world, ("delay-view", 0)), ("reconcile", 0)).late_view) or not late[1].confirmed_request
    ):
        world = step(world, ("reconcile", 0))
        if ("reconcile", 0) not in calm(world):
            world = step(world, ("tick", 0))
    world = step(step(world, ("delay-view", 0)), ("reconcile", 0))
    request = world.stores[0].state.confirmation_requested_at
    while world.stores[0].state.confirmation_requested_at == request:
        world = step(world, ("tick", 0))
    return world


def test_interleavings_around_a_confirmation_of_an_older_request(wide: bool) -> None:
    assert not explore(late_confirmation(), (), 0, WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("kind", ["restart-store", "restart-in-place", "crash"])
def test_interleavings_around_a_charged_failure_while_the_store_dies(kind: str, wide: bool) -> None:
    start = charged()
    assert start.charged == 2
    assert not explore(start, (kind,), 1, WIDE_STATES if wide else STATES)


def recovered_without_a_round() -> World:
    """A worker fails while no store runs. The first agent of the next store has a new pod; the others come late."""
    world = settle(step(step(running(), ("vanish", 2)), ("restart-store", 0)), but=("tick", "connect"))
    world = settle(step(step(world, ("fail", 0)), ("connect", NEW_POD)), but=("tick", "connect"))
    while world.stores[-1].state.recovering_until is not None:
        world = settle(step(world, ("tick", 0)), but=("tick", "connect"))
    return world


NEW_POD = 2 + INCARNATIONS
"""The number of the agent in the second pod of index 2."""


@pytest.mark.parametrize("kind", ["restart-store", "second-store", "blip"])
def test_interleavings_around_members_that_connect_after_recovery(kind: str, wide: bool) -> None:
    start = recovered_without_a_round()
    assert start.stores[-1].state.rounds == 0
    assert not explore(start, (kind,), 1, WIDE_STATES if wide else STATES)


def test_a_search_says_whether_it_came_to_an_end() -> None:
    """A job that has ended has few worlds ahead of it: they can all be explored."""
    short, ended = search(running(), ("fail",), 1, 50), finishing()
    while moves := list(calm(ended)):
        before, ended = ended, step(ended, moves[0])
    whole = search(before, (), 0, 1000)
    assert not short.exhaustive
    assert short.depth > 0
    assert "cut short" in str(short)
    assert whole.exhaustive
    assert "all there are" in str(whole)
    assert not short.wrong + whole.wrong


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 8), st.integers(0, 2), st.lists(st.tuples(st.booleans(), st.integers(0, 10_000)), max_size=60))
def test_large_jobs(size: int, spares: int, choices: list[tuple[bool, int]]) -> None:
    """Random faults of many agents break no invariant, and the job ends once they stop."""
    world, trace = running(size, spares), list[Move]()
    for fault, choice in choices:
        moves = list(faults(world) if fault and choice % 3 == 0 else calm(world)) or list(calm(world))
        if not moves:
            break
        move = moves[choice % len(moves)]
        after = step(world, move)
        trace.append(move)
        assert not broken_invariants(world, move, after), trace
        world = after
    assert not liveness_violation(world, 4000), trace


# ---- the exploration finds seeded bugs


def _conclude_early(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Wrong: conclude a round before all its members have stopped."""
    if state.round is not None and state.round.ending is not None:
        members = {b: replace(m, lost=True) for b, m in state.round.members.items()}
        state = replace(state, round=replace(state.round, members=members))
    return _conclude_round(state, now)


_conclude_round = round_conclusion.conclude_round


def _apply_to_any_round(state: CoordinatorState, node: KnownAgent, message: WorkersStopped) -> CoordinatorState:
    """Wrong: apply messages about an older round to the current one."""
    if state.round is not None:
        message = replace(message, round=state.round.id)
    return _apply_worker_state(state, node, message)


_apply_worker_state = agent_messages.apply_worker_state


def _charge_again(state: CoordinatorState, view: OperatorView, now: float) -> CoordinatorState:
    """Wrong: report a charge again, as one of another round."""
    return replace(
        _apply_operator_view(state, view, now),
        ended_rounds=tuple(
            replace(e, round=e.round._replace(number=e.round.number + 100)) for e in state.ended_rounds if e.charged
        ),
    )


_apply_operator_view = operator_views.apply_operator_view


def _with_rule(number: int, rule: Rule) -> tuple[Rule, ...]:
    return (*rounds.RULES[:number], rule, *rounds.RULES[number + 1 :])


@pytest.mark.parametrize(
    ("module", "name", "value", "kinds", "found"),
    [
        (
            rounds,
            "RULES",
            _with_rule(rounds.RULES.index(_conclude_round), _conclude_early),
            ("fail",),
            "while_its_workers_run",
        ),
        (agent_messages, "apply_worker_state", _apply_to_any_round, ("late",), "old_messages_have_no_effect"),
        (apply_event, "apply_operator_view", _charge_again, ("fail",), "each_failure_is_charged_once"),
    ],
)
def test_a_seeded_bug_is_found(
    module: ModuleType, name: str, value: object, kinds: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = running()
    monkeypatch.setattr(module, name, value)
    assert found in explore(start, kinds, 1, 5000)
