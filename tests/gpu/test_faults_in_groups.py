"""Faults that find ranks in groups of a device mesh, or in the middle of forming their groups. Ranks share the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

HEAD = """
import os, sys, time
os.environ["NCCL_HOSTID"] = str(os.getpid())
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
if sys.argv[1] == "nonblocking":
    os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
import torch
import torch.distributed as dist
import elasticjob

CUDA = torch.cuda.is_available()
device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
calls = 0
torch.set_num_threads(1)

def init():
    eager = {"device_id": device} if CUDA and sys.argv[1] != "lazy" else {}
    dist.init_process_group("nccl" if CUDA else "gloo", **eager)

def synchronize():
    if CUDA:
        torch.cuda.synchronize()

def say(text):
    os.write(1, f"{text} rank {os.environ['RANK']} pid {os.getpid()} call {calls} at {time.time():.3f}\\n".encode())
"""

REDUCES_OVER_A_MESH = """
from torch.distributed.device_mesh import init_device_mesh

@elasticjob.restartable
def train():
    global calls
    calls += 1
    init()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [mesh.get_group(0), mesh.get_group(1)]
    values = torch.ones(1 << 16, device=device)
    for step in range(10 ** 9 if calls == 1 and dist.get_rank() != 3 else 60):
        for group in groups:
            dist.all_reduce(values, group=group)
            values /= 2
        if step % 10 == 0:
            synchronize()
        if step == 20:
            say("runs")
    if calls == 1:
        say("raises")
        raise ValueError("bad batch")
    synchronize()
    dist.destroy_process_group()

train()
"""
"""Rank 3 raises while the others reduce over dimensions of a mesh. They have new calls in the next round."""

RAISES_WHILE_GROUPS_FORM = """
network = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
state = elasticjob.State(network=network, optimizer=optimizer, step=0)

@elasticjob.restartable
def train():
    global calls
    calls += 1
    rank = int(os.environ["RANK"])
    say(f"begins with step {state.step}")
    if calls == 2 and rank == 1:
        time.sleep(2)  # the others wait for this rank
        say("raises")
        raise ValueError("no data")
    init()
    state.sync()
    model = torch.nn.parallel.DistributedDataParallel(network, device_ids=[0] if CUDA else None)
    for _ in range(10 ** 9 if calls < 3 else 20):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device=device)).sum().backward()
        synchronize()
        optimizer.step()
        state.step += 1
        while calls == 1 and state.step == 30:  # outside of collectives: gloo may lose an operation
            if rank == 2:
                raise ValueError("the first fault")
            time.sleep(0.01)
    synchronize()
    dist.destroy_process_group()

train()
"""
"""Nothing is committed: a process that is replaced has lost its steps."""


def processes(run: LocalRun, pattern: str, count: int) -> dict[str, str]:
    """Return the process id by rank, from the next lines like `pattern`."""
    matches = [run.wait_for(pattern, 90) for _ in range(count)]
    return {match[1]: match[2] for match in matches}


@pytest.mark.rehearsed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("groups", ["eager", "lazy"])
def test_processes_that_wait_in_a_group_of_a_mesh_stay(groups: str, tmp_path: Path) -> None:
    """`eager`: with a device, a mesh gets its groups by `split_group`, else by `new_group`."""
    command = [*script(tmp_path, HEAD + REDUCES_OVER_A_MESH), groups]
    with LocalRun(manifest(command, replicas=4, preload=["torch", "torch._dynamo"]), tmp_path) as run:
        first = processes(run, r"runs rank (\d) pid (\d+) call 1", 4)
        begun = float(run.wait_for(r"raises rank 3 pid \d+ call 1 at (\S+)")[1])
        found = [run.wait_for(r"runs rank (\d) pid (\d+) call (\d) at (\S+)", 90) for _ in range(4)]
        print(f"{max(float(match[4]) for match in found) - begun:.3f} s from the exception to step 20")
        lost = re.findall(r"gloo has lost an operation .* replaces (\d+)", run.text)
        replaced = {first[match[1]] for match in found if match[2] != first[match[1]]}
        assert replaced <= set(lost), "the processes of the mesh have stayed"
        assert run.exit_code() == 0, run.text


@pytest.mark.rehearsed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("groups", ["eager", "lazy", "nonblocking"])
def test_a_fault_while_groups_form_costs_no_step(groups: str, tmp_path: Path) -> None:
    command = [*script(tmp_path, HEAD + RAISES_WHILE_GROUPS_FORM), groups]
    job = manifest(
        command, replicas=3, preload=["torch", "torch._dynamo"], failurePolicy={"maxRestarts": 5}
    )  # fmt: skip
    with LocalRun(job, tmp_path) as run:
        first = processes(run, r"begins with step 0 rank (\d) pid (\d+) call 1", 3)
        begun = float(run.wait_for(r"raises rank 1 pid \d+ call 2 at (\S+)", 90)[1])
        found = [run.wait_for(r"begins with step (\d+) rank (\d) pid (\d+) call (\d)", 90) for _ in range(3)]
        print(f"{[match[0] for match in found]}, after the exception at {begun}")
        assert {match[1] for match in found} == {"30"}, "no rank has lost its steps"
        assert {match[2]: match[3] for match in found} == first, "the processes have stayed"
        assert run.exit_code() == 0, run.text
