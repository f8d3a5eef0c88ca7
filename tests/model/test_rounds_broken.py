"""Jobs whose devices work behind the host: no agent breaks its collectives while another one counts steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import ModuleType

import pytest

from elasticjob._runtime.contract.messages import BreakRound
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.rounds.ends import round_break
from elasticjob._runtime.rendezvous.state import CoordinatorState, SendToAgent
from support.rendezvous.rounds_explorer import explore
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation, no_node_keeps_a_broken_result
from support.rendezvous.rounds_options import JobOptions
from support.rendezvous.rounds_world import World, begin, calm, faults, settle, step, with_standby

STATES, WIDE_STATES = 500, 20_000
SEEDS, WIDE_SEEDS, STEPS = 6, 600, 160
KINDS = (
    "fail", "collective", "collective", "exit", "blip", "blip", "crash", "sigterm", "cut", "target", "pause",
    "half-open", "deaf", "restart-store", "restart-in-place",
)  # fmt: skip

INVARIANTS = (no_node_keeps_a_broken_result,)
"""Those of random worlds, in which agents and stores may be slower than all time-outs at once."""

WORLDS = {
    "three nodes": replace(settle(begin(3, 0)), asynchronous=True),
    "four nodes of two workers": replace(settle(begin(4, 0, workers=2)), asynchronous=True),
    "a spare": replace(settle(begin(4, 1, options=JobOptions())), asynchronous=True),
    "a standby store": replace(settle(with_standby()), asynchronous=True),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("kinds", [("collective",), ("collective", "blip"), ("fail", "cut")], ids="+".join)
def test_interleavings_around_the_break_of_a_round(name: str, kinds: tuple[str, ...], wide: bool) -> None:
    assert not explore(WORLDS[name], kinds, len(kinds), WIDE_STATES if wide else STATES)


@pytest.mark.parametrize("name", WORLDS)
def test_random_faults_leave_no_broken_result(name: str, wide: bool) -> None:
    for seed in range(WIDE_SEEDS if wide else SEEDS):
        assert not (wrong := after_random_faults(WORLDS[name], seed)), f"seed {seed}: {wrong}"


def after_random_faults(world: World, seed: int) -> str:
    """Return the invariants that random faults break, or why the job does not end after them; empty if all hold."""
    random, world = Random(seed), replace(world, batched=seed % 4 == 1)
    for _ in range(STEPS):
        quiet = list(calm(world))
        moves = [m for m in quiet if m[0] != "tick" or random.random() < 0.3] or quiet
        if random.random() < 0.1 or not moves:
            moves = list(faults(world, (random.choice(KINDS),))) or list(faults(world, KINDS)) or moves
        if not moves:
            break
        move = random.choice(moves)
        after = step(world, move)
        if wrong := broken_invariants(world, move, after, INVARIANTS):
            return f"{move}: {wrong}"
        world = after
    return liveness_violation(world, 4000, INVARIANTS)


def _keep_state(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Wrong: let an agent that was lost go on with its state."""
    decision = _break_round(state, now)
    if decision is None:
        return None
    kept = [
        SendToAgent(e.agent_id, BreakRound(e.message.round))
        for e in decision.effects
        if isinstance(e.message, BreakRound)
    ]
    return replace(decision, effects=tuple(kept))


_break_round = round_break.break_round


@pytest.mark.parametrize(
    ("module", "name", "value", "found"),
    [
        (round_break, "_all_have_ended", lambda _: True, "no_node_keeps_a_broken_result"),
        (rounds, "RULES", tuple(_keep_state if r is _break_round else r for r in rounds.RULES), "no_node_keeps"),
    ],
)
def test_a_seeded_mistake_is_found(
    module: ModuleType, name: str, value: object, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, value)
    assert any(found in after_random_faults(WORLDS["three nodes"], seed) for seed in range(10 * SEEDS))
