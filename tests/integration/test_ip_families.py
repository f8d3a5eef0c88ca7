"""Whole jobs where nodes and stores have addresses of IPv6 only, or of both families."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from elasticjob._runtime.contract.messages import RoundPhase, RoundSettings
from elasticjob._runtime.contract.names import Backend, Env, job_store_clients
from support.agent.cluster import AgentCluster, start_training
from support.common.child_process import ChildProcess
from support.common.machines import machines, run_within_namespace
from support.training.wrapper_ranks import PRELUDE

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip"),
]

NODES = 2
STEPS = """
import os, sys, time
import torch
import torch.distributed as dist
import elasticjob

def train():
    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for step in range(1_000_000):
        total.fill_(1.0)
        dist.all_reduce(total)
        if step in (3, 30):
            name = f"{os.environ['RANK']} of {int(total)} over {os.environ['MASTER_ADDR']}"
            print(f"step {step} rank {name} pid {os.getpid()} at {time.time()}", flush=True)
        elasticjob.progress(step)
        time.sleep(0.02)
    dist.destroy_process_group()

(elasticjob.restartable(train) if sys.argv[1] == "restartable" else train)()
"""


@dataclass(frozen=True)
class Case:
    """A cluster: prefix of the nodes' addresses, that of the stores' addresses, and how workers are restarted."""

    nodes: str
    stores: str
    how: str
    backend: Backend = Backend.ELASTICJOB


V4, V6 = "10.9.0.", "fd00:9::"
CASES = {
    "ipv6": Case(V6, V6, "processes"),
    "ipv6-restartable": Case(V6, V6, "restartable"),
    "ipv6-c10d": Case(V6, V6, "processes", Backend.C10D),
    "nodes-ipv6-stores-ipv4": Case(V6, V4, "restartable"),
    "nodes-ipv4-stores-ipv6": Case(V4, V6, "processes"),
}


class Machines(AgentCluster):
    nodes = NODES
    settings = RoundSettings(min_nodes=NODES, max_nodes=NODES, target=NODES)
    script = STEPS


def interfaces(case: Case, number: int) -> list[str]:
    """Return the addresses of a machine with the lengths of their prefixes."""
    prefixes = sorted({case.nodes, case.stores})
    return [f"{prefix}{number}/{24 if prefix == V4 else 64}" for prefix in prefixes]


async def run_case(case: Case, folder: Path) -> None:
    """Start a job, kill a worker, and wait for the next round. Needs a network namespace of its own."""
    addresses = [interfaces(case, 10 + index) for index in range(NODES)]
    with machines(addresses, interfaces(case, 1)) as within:
        cluster = Machines(folder)
        cluster.within = within
        cluster.hosts = tuple(f"{case.nodes}{10 + index}" for index in range(NODES))
        cluster.store_hosts = tuple(f"{case.stores}{10 + index}" for index in range(NODES))
        cluster.arguments = (case.how,)
        cluster.environ = {
            Env.RENDEZVOUS_BACKEND: case.backend.value,
            Env.STORE_CLIENTS: job_store_clients(case.backend).value,
        }
        if case.backend is Backend.C10D:
            cluster.launcher = (sys.executable, "-m", "torch.distributed.run")
        workers: list[int] = []
        try:
            await start_training(cluster)
            lines = [await agent.line("step 30 ") for agent in cluster.agents]
            pids = [int(line.split(" pid ")[1].split()[0]) for line in lines]
            seen = [len(agent.lines) for agent in cluster.agents]
            os.kill(pids[1], signal.SIGKILL)
            again = [await agent.line("step 30 ", since) for agent, since in zip(cluster.agents, seen, strict=True)]
            for line in (*lines, *again):
                assert f"of {NODES} over {case.nodes}" in line, line
            survivors = workers = [int(line.split(" pid ")[1].split()[0]) for line in again]
            assert (survivors[0] == pids[0]) == (case.how == "restartable"), (pids, survivors)
            cluster.stores[0].kill()
            await cluster.report(1, RoundPhase.RUNNING, NODES)
        except BaseException:
            for process in cluster.processes:
                print("\n".join(process.lines[-60:]), "\n---")
            raise
        finally:
            await cluster.close()
            for pid in workers:  # those of torch's own agent outlive it
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


WRAPPED = """
from elasticjob.inprocess._groups import process_groups
from elasticjob.inprocess._groups.own_sockets import connections

meet()

@Wrapper(abort=AbortTorchDistributed())
def train(call: CallWrapper):
    groups = process_groups.ProcessGroups()
    with groups.watch():
        join(call)
        say("connections of gloo", sorted(groups.addresses), len(list(connections(groups.addresses))))
    if call.iteration == 0:
        if os.environ["RANK"] == "1":
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        wait_in_collective()

train()
"""
PORT = 29600


def run_wrapped(folder: Path) -> None:
    """Run a wrapped function on two machines with addresses of IPv6; one of its ranks is killed."""
    script = folder / "script.py"
    script.write_text(PRELUDE + WRAPPED)
    addresses = [f"{V6}{10 + index}" for index in range(NODES)]
    with machines([[f"{address}/64"] for address in addresses], [f"{V6}1/64"]) as within, ExitStack() as running:
        ranks = []
        for number, namespaces in enumerate(within):
            environ = {"RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": NODES, "MASTER_ADDR": addresses[0]}
            variables = {name: str(value) for name, value in (environ | {"MASTER_PORT": PORT}).items()}
            command = [*namespaces, sys.executable, str(script), str(folder)]
            ranks.append(running.enter_context(ChildProcess(command, env={**os.environ, **variables})))
        for rank in ranks:
            rank.wait_for("trains . of 2 iteration 0", 120)
            rank.wait_for(rf"connections of gloo \[\('{V6}10', \d+\), \('{V6}11', \d+\)\] 1$")
        ranks[0].wait_for("trains 0 of 1 iteration [1-9]", 120)
        assert ranks[0].exit_code() == 0


def test_a_wrapped_function_goes_on_without_a_rank_where_addresses_are_of_ipv6(tmp_path: Path) -> None:
    run_within_namespace(__file__, "wrapped", str(tmp_path), timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_a_job_recovers_where_addresses_are_of(name: str, tmp_path: Path) -> None:
    """A worker is killed; then the store dies, and its standby store takes over."""
    run_within_namespace(__file__, name, str(tmp_path), timeout=240)


if __name__ == "__main__":
    if sys.argv[1] == "wrapped":
        run_wrapped(Path(sys.argv[2]))
    else:
        asyncio.run(run_case(CASES[sys.argv[1]], Path(sys.argv[2])))
