"""Stages in random walks with faults: none is finished that a member has not ended, and no two run at the same time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.state import AgentPhase
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.rounds import stages
from elasticjob._runtime.rendezvous.state import CoordinatorState, Round
from support.rendezvous.rounds_agent import Agent, dispatch
from support.rendezvous.rounds_world import World, calm, faults, running, step

SEEDS, STEPS = 40, 150
FAULTS = ("crash", "blip", "fail", "sigterm", "cut", "late", "half-open", "restart-store", "restart-in-place", "target")

Truth = dict[tuple[RoundId, str], int]
"""By round and pod: the last stage that all ranks of the pod have ended in the round."""


def runs(a: Agent) -> bool:
    return a.machine.phase is AgentPhase.RUNNING and a.ended is None and not (a.killing or a.frozen or a.paused)


def end_stage(world: World, random: Random, truth: Truth) -> World:
    """Let all ranks of the present launcher of a pod end."""
    able = [i for i, a in enumerate(world.agents) if runs(a) and not a.machine.waits_for_stage]
    if not able:
        return world
    i = random.choice(able)
    a = world.agents[i]
    assert a.start is not None
    stage = a.machine.announcement.finished_stages + 1
    truth[a.start.round, a.pod] = stage
    a = dispatch(a, events.StageOver(a.start.round, stage), world.now)
    return replace(world, agents=(*world.agents[:i], a, *world.agents[i + 1 :]))


def finished_too_early(before: World, after: World, truth: Truth) -> str:
    """Return what is wrong: a store has finished a stage that not all members of its round have ended."""
    known = {s.incarnation: s.state.finished_stages for s in before.stores}
    announced = max((a.machine.announcement.finished_stages for a in before.agents), default=0)
    for store in after.stores:
        state, n = store.state, store.state.finished_stages
        if n <= max(known.get(store.incarnation, 0), announced) or state.round is None:
            continue
        behind = [m.pod for m in state.round.members.values() if truth.get((state.round.id, m.pod), 0) < n]
        if behind:
            return f"store {store.incarnation} has finished stage {n}, which {behind} have not ended"
    return ""


def two_stages(world: World) -> str:
    """Return what is wrong: ranks of two stages run in one round."""
    found: dict[RoundId, list[Agent]] = {}
    for a in world.agents:
        if runs(a) and a.start is not None:
            found.setdefault(a.start.round, []).append(a)
    for round_id, agents in found.items():
        stages_that_run = {a.machine.announcement.finished_stages + 1 for a in agents if not a.machine.waits_for_stage}
        if len(stages_that_run) > 1:
            return f"stages {sorted(stages_that_run)} run in round {round_id}"
    return ""


def walk(seed: int) -> str:
    """Return what is wrong after one walk, at whose end every member that waits gets its answer."""
    random, world, truth = Random(seed), running(2 + seed % 3, seed % 2), Truth()
    for n in range(STEPS + 60):
        before = world
        if n < STEPS and random.random() < 0.25:
            world = end_stage(world, random, truth)
        elif moves := list(faults(world, FAULTS)) if n < STEPS and random.random() < 0.05 else list(calm(world)):
            world = step(world, random.choice(moves))
        if wrong := finished_too_early(before, world, truth) or two_stages(world):
            return f"seed {seed}: {wrong}"
    return stuck(world)


def stuck(world: World) -> str:
    """Return what is wrong if all members of a round wait for the end of their stage, and no message is on its way."""
    for _ in range(400):
        moves = [m for m in calm(world) if m[0] != "tick"]
        if not moves:
            break
        world = step(world, moves[0])
    for store in world.stores:
        state = store.state
        if state.round is None or state.round.ending is not None or state.passive or state.newer_store is not None:
            continue
        pods = {m.pod for m in state.round.members.values()}
        members = [a for a in world.agents if a.pod in pods and runs(a) and a.store == store.incarnation]
        if len(members) == len(pods) and all(a.machine.waits_for_stage for a in members) and not store.queue:
            return f"all members of round {state.round.id} wait"
    return ""


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_no_stage_is_finished_early_and_no_two_run_together(first: int) -> None:
    for seed in range(first, first + 10):
        assert not (wrong := walk(seed)), wrong


def _first_report(state: CoordinatorState, round_: Round) -> int:
    """Wrong: one member is enough."""
    return max((m.ended_stage for m in round_.members.values()), default=0)


def test_a_stage_that_one_member_finishes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ended_stage", _first_report)
    assert any(walk(seed) for seed in range(SEEDS))


def test_members_that_wait_for_ever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ended_stage", lambda _state, _round: 0)
    assert any("wait" in walk(seed) for seed in range(SEEDS))
