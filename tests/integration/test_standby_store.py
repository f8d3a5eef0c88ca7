"""A store and its standby store as real processes, with real agents: the store dies, alone or with a node."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elasticjob._runtime.contract.messages import RoundPhase
from support.agent.cluster import NODES, AgentCluster, start_training
from support.common.machines import machines, run_tool, run_within_namespace


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[AgentCluster]:
    found = AgentCluster(tmp_path)
    try:
        await start_training(found)
        yield found
    finally:
        await found.close()


async def test_when_the_store_dies_its_standby_store_takes_over_and_training_does_not_notice(
    cluster: AgentCluster,
) -> None:
    pids = [agent.steps()[-1][2] for agent in cluster.agents]
    cluster.stores[0].kill()
    await cluster.report(1, RoundPhase.RUNNING, NODES)
    taken_over = time.time()
    async with asyncio.timeout(60):
        while any(agent.steps()[-1][3] < taken_over for agent in cluster.agents):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    for agent, pid in zip(cluster.agents, pids, strict=True):
        steps = agent.steps()
        assert {found for _, _, found, _ in steps} == {pid}
        assert [number for number, *_ in steps] == list(range(len(steps)))


async def test_when_the_store_and_a_node_die_together_the_others_go_on(cluster: AgentCluster) -> None:
    """Rank 0 is on the lost node. No operator is needed: its links are closed."""
    for link in cluster.operators:
        link.close()
    killed = time.time()
    cluster.stores[0].kill()
    cluster.agents[0].kill()
    await next_step(cluster, killed)


async def next_step(cluster: AgentCluster, fault: float) -> None:
    """Wait until the others make a step without agent 0, and print the seconds from the fault to that of the last."""
    seconds = 0.0
    for agent in cluster.agents[1:]:
        await agent.line(f"step 0 of {NODES - 1} ")
        first = next(at for _, size, _, at in agent.steps() if size == NODES - 1)
        seconds = max(seconds, first - fault)
    print(f"next step after {seconds:.3f} s")


# ---- the machine of the store is cut off


class CutOff(AgentCluster):
    hosts = tuple(f"10.9.0.{10 + index}" for index in range(NODES))


async def cut_off(folder: Path) -> None:
    """Cut the store's machine off, and print how long the others take. Needs a network namespace of its own."""
    with machines([[f"{host}/24"] for host in CutOff.hosts], ["10.9.0.1/24"]) as CutOff.within:
        cluster = CutOff(folder)
        try:
            await start_training(cluster)
            cut = time.time()
            run_tool("ip", "link", "set", "v0", "down")
            await next_step(cluster, cut)
        finally:
            await cluster.close()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
def test_when_the_machine_of_the_store_is_cut_off_the_others_go_on(tmp_path: Path) -> None:
    """Keep-alive detects it after 2 to 3 s. Without it TCP tries for 15 minutes. The store's machine holds rank 0."""
    output = run_within_namespace(__file__, str(tmp_path), timeout=240)
    found = re.search(r"next step after ([0-9.]+) s", output)
    assert found, output
    print(found[0])


if __name__ == "__main__":
    asyncio.run(cut_off(Path(sys.argv[1])))
