"""A machine whose end is announced with a time, with real stores and agents: its workers learn how long they have."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.contract.messages import (
    EndingPod,
    ExpectedPod,
    OperatorView,
    PodState,
    RoundPhase,
    StandbyStore,
)
from support.agent.cluster import NODES, AgentCluster, Process, start_training

CLOCK = 1_000_000.0
"""What the operator's clock shows, far from that of this machine."""
ASKS = """
import itertools, time
import elasticjob
for step in itertools.count():
    print("step", step, "has", elasticjob.deadline(), "at", time.time(), flush=True)
    time.sleep(0.02)
"""


class AskingCluster(AgentCluster):
    script = ASKS


def view(sequence: int, ends: dict[str, float]) -> OperatorView:
    """Return the view with the seconds until the machines of some pods end."""
    pods = tuple(ExpectedPod(index, 0, f"j-{index}-0", PodState.RUNNING) for index in range(NODES))
    ending = tuple(EndingPod(pod, CLOCK + seconds) for pod, seconds in ends.items())
    return OperatorView(1, sequence, AgentCluster.settings, 0, None, pods, serving=0, sent_at=CLOCK, ending_pods=ending)


def last(agent: Process) -> tuple[float | None, float]:
    """Return what the worker's last call returned, and when that was, Unix seconds."""
    found = [m for line in agent.lines if (m := re.search(r"step \d+ has (\S+) at (\S+)$", line))]
    return (None if found[-1][1] == "None" else float(found[-1][1])), float(found[-1][2])


async def until_known(agent: Process, known: bool) -> None:
    for _ in range(12000):
        if (last(agent)[0] is not None) is known:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("\n".join(agent.lines[-20:]))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[AskingCluster]:
    found = AskingCluster(tmp_path)
    try:
        await start_training(found)
        yield found
    finally:
        await found.close()


async def test_workers_know_the_end_of_their_machine_also_from_a_store_that_has_taken_over(
    cluster: AskingCluster,
) -> None:
    running = await cluster.report(0, RoundPhase.RUNNING, NODES)
    ending, sent = view(3, {"j-1-0": 500.0}), time.time()
    standby = StandbyStore(1, cluster.hosts[1], cluster.ports[1])
    cluster.operators[0].send(replace(ending, standby_store=standby))
    also = (*(ending.ending_pods or ()), EndingPod("j-2-0", CLOCK + 800.0))
    cluster.operators[1].send(replace(ending, ending_pods=also, newest_round=running.round))
    await until_known(cluster.agents[1], True)
    left, at = last(cluster.agents[1])
    assert left == pytest.approx(sent + 500.0 - at, abs=5.0)
    assert [last(cluster.agents[index])[0] for index in (0, 2)] == [None, None]
    cluster.stores[0].kill()
    await cluster.report(1, RoundPhase.RUNNING, NODES)
    await until_known(cluster.agents[2], True)
    left, at = last(cluster.agents[2])
    assert left == pytest.approx(sent + 800.0 - at, abs=5.0)
    cluster.operators[1].send(replace(view(4, {"j-2-0": 800.0}), serving=1))
    await until_known(cluster.agents[1], False)
    assert last(cluster.agents[2])[0] is not None, "still announced"
