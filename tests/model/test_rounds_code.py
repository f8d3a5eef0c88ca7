"""New code of a running job in random walks with faults: no round has two versions, and the last one is trained."""

from __future__ import annotations

from random import Random

import pytest

from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.rounds.ends import code_update
from support.rendezvous.rounds_invariants import broken_invariants
from support.rendezvous.rounds_world import World, calm, faults, running, settle, step

SEEDS, STEPS = 12, 120
FAULTS = (
    *["update"] * 6, "crash", "blip", "fail", "sigterm", "cut", "late", "half-open", "restart-store",
    "restart-in-place", "second-store", "target", "operator-down",
)  # fmt: skip


def two_versions(world: World) -> str:
    """Return what is wrong: pods have two versions of the code for one round."""
    found: dict[RoundId, set[str]] = {}
    for a in world.agents:
        if a.start is not None:
            found.setdefault(a.start.round, set()).add(a.start.code)
    wrong = [round_id for round_id, versions in found.items() if len(versions) > 1]
    return f"rounds {wrong} have two versions" if wrong else ""


def walk(seed: int) -> str:
    """Return what is wrong after one walk, at whose end the job trains with the code that it was given last."""
    random, world = Random(seed), running(3 + seed % 2, seed % 2)
    for _ in range(STEPS):
        moves = list(faults(world, FAULTS)) if random.random() < 0.1 else list(calm(world))
        if not moves:
            continue
        move = random.choice(moves)
        after = step(world, move)
        if wrong := broken_invariants(world, move, after) or two_versions(after):
            return f"seed {seed}, {move}: {wrong}"
        world = after
    return outdated(settle(world))


def outdated(world: World) -> str:
    """Return what is wrong: a job that trains does it with older code."""
    rounds = [s.state.round for s in world.serving if s.state.newer_store is None]
    if not rounds or (round_ := rounds[-1]) is None or round_.ending is not None or not round_.formed_at:
        return ""
    versions = {member.assignment.code for member in round_.members.values()}
    return f"trains with {versions} after update {world.code}" if versions - {f"code-{world.code}"} else ""


def test_no_round_has_two_versions_and_the_last_one_is_trained() -> None:
    assert [wrong for seed in range(SEEDS) if (wrong := walk(seed))] == []


def test_a_job_that_keeps_its_old_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    updated = step(running(), ("update", 0))
    assert outdated(settle(updated)) == ""
    monkeypatch.setattr(code_update, "begin_end", lambda *_, **__: None)
    assert "after update" in outdated(settle(updated))
