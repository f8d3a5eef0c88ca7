"""Nodes that end at an announced time: each agent there learns how long it has, whatever else happens.

The clock of the operator is far ahead of those of the stores and the agents (`rounds_operator.SKEW`).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from elasticjob._runtime.agent.state_machine.state import AgentPhase
from elasticjob._runtime.rendezvous.node_ends import EARLIER_SECONDS
from support.rendezvous.rounds_agent import Agent
from support.rendezvous.rounds_explorer import explore
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_operator import node_of
from support.rendezvous.rounds_world import World, begin, calm, faults, running, settle, step, with_standby

STATES, WIDE_STATES = 1000, 20_000
SEEDS, WIDE_SEEDS = 16, 300
STEPS = 160
"""Moves of a walk."""
KINDS = ("spot", "spot", "blip", "half-open", "cut", "fail", "crash", "sigterm", "pause", "old-view", "operator-down",
         "restart-store", "restart-in-place", "second-store", "kill-standby", "cut-store")  # fmt: skip


def test_a_node_knows_the_end_of_its_machine_before_its_workers_stop() -> None:
    world = step(settle(running()), ("spot", 1))
    while world.agent(1).machine.phase is AgentPhase.RUNNING:
        world = step(world, next(m for m in calm(world) if m[0] != "tick"))
    assert world.agent(1).machine.phase is AgentPhase.STOPPING
    end = dict(world.ends)[node_of(world.agent(1))]
    assert world.agent(1).machine_end == pytest.approx(end, rel=0.0, abs=0.01)
    assert [a.machine_end for a in world.agents if a.index != 1] == [None, None]
    assert not liveness_violation(world)


def on_their_way(world: World) -> bool:
    """Return whether messages wait to be read: time does not pass until they are."""
    return any(a.inbox or a.outbox or a.old_outbox for a in world.agents) or any(s.queue for s in world.stores)


def knows_a_later_end(world: World) -> list[Agent]:
    """Return the agents that take the end of their Node to be later than it is."""
    ends = dict(world.ends)
    known = [a for a in world.agents if a.machine_end is not None]
    return [a for a in known if (a.machine_end or 0.0) > ends[node_of(a)] + EARLIER_SECONDS]


@pytest.mark.parametrize("standby", [False, True], ids=["one store", "a standby store"])
def test_walks_with_nodes_that_end(standby: bool, wide: bool) -> None:
    informed = 0
    for seed in range(WIDE_SEEDS if wide else SEEDS):
        random, world = Random(seed), with_standby() if standby else settle(begin(spares=seed % 2))
        world = replace(world, batched=seed % 4 == 1)
        for _ in range(STEPS):
            moves = list(calm(world))
            if not moves or random.random() < 0.12:
                moves = list(faults(world, (random.choice(KINDS),))) or moves
            moves = [m for m in moves if m[0] != "tick" or not on_their_way(world)]
            if not moves:
                break
            move = random.choice(moves)
            after = step(world, move)
            assert not (wrong := broken_invariants(world, move, after)), f"seed {seed}: {move}: {wrong}"
            assert not (late := knows_a_later_end(after)), f"seed {seed}: {move}: {late}"
            informed += sum(b.machine_end is not None for b in after.agents) > sum(
                a.machine_end is not None for a in world.agents
            )
            world = after
        assert not (wrong := liveness_violation(world, 4000)), f"seed {seed}: {wrong}"
    assert informed > SEEDS, "the walks are about something"


@pytest.mark.parametrize("kinds", [("spot",), ("spot", "blip"), ("spot", "restart-store")], ids="+".join)
def test_interleavings_around_a_node_that_ends(kinds: tuple[str, ...], wide: bool) -> None:
    assert not explore(running(), kinds, len(kinds), WIDE_STATES if wide else STATES)
