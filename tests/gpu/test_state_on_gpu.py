"""`elasticjob.State` over nccl on a real GPU: a new process gets the state, a device with a sticky error a new process.

Ranks share the GPU: each claims to be a host of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

TRAINS = """
import hashlib, os, sys, time
os.environ["NCCL_HOSTID"] = str(os.getpid())
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elasticjob

folder = sys.argv[1]
device = torch.device("cuda", 0)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
state = elasticjob.State(network=network, optimizer=optimizer, scaler=scaler, step=0)

def digest():
    parts = [*network.parameters(), *(value for each in optimizer.state.values() for value in each.values())]
    data = b"".join(part.detach().cpu().numpy().tobytes() for part in parts)
    return hashlib.sha256(data + bytes(torch.cuda.get_rng_state().tolist())).hexdigest()[:16]

@elasticjob.restartable
def train():
    dist.init_process_group("nccl", device_id=device)
    state.sync()
    rank, begin = dist.get_rank(), state.step
    model = DistributedDataParallel(network, device_ids=[0])
    stop = torch.zeros(1, device=device)
    while not stop.item():
        optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(state.step)).to(device)
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        state.step += 1
        if state.step == begin + 5:
            print(f"rank {rank} pid {os.getpid()} from {begin} digest {digest()}\\n", end="", flush=True)
        if os.path.exists(f"{folder}/break-{rank}"):
            os.unlink(f"{folder}/break-{rank}")
            torch.zeros(1, device=device)[torch.tensor([5], device=device)].cpu()  # an assertion in a kernel
        stop.fill_(float(rank == 0 and os.path.exists(f"{folder}/done")))
        dist.broadcast(stop, 0)
    dist.destroy_process_group()

train()
"""


COMMITS_BESIDE_STEPS = """
import torch, elasticjob
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob.training import progress_channel

progress_channel.channel.memory = tuple(memory_file("test") for _ in range(3))  # an agent's, for all States
device = torch.device("cuda", 0)

def make():
    model = torch.nn.Sequential(torch.nn.Conv2d(256, 256, 4), torch.nn.Flatten(), torch.nn.Linear(256, 256)).to(device)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, elasticjob.State(model=model, optimizer=optimizer)

def tensors(model, optimizer):
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return [value.detach().cpu().clone() for value in (*model.state_dict().values(), *moments)]

def step():
    model(torch.randn(8, 256, 4, 4, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1

model, optimizer, state = make()
for _ in range(20):
    step()
    state.commit(non_blocking=True)
committed = tensors(model, optimizer)
step()
assert not all(map(torch.equal, tensors(model, optimizer), committed))
model, optimizer, state = make()
state.sync()
assert state.step == 20
assert all(map(torch.equal, tensors(model, optimizer), committed))
print("the same")
"""


def test_a_commit_beside_steps_has_the_weights_of_its_moment(tmp_path: Path) -> None:
    command = script(tmp_path, COMMITS_BESIDE_STEPS)
    assert subprocess.check_output(command, text=True, timeout=200).strip() == "the same"


COMMITS_TO_REGISTERED_MEMORY = """
import torch, elasticjob
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob.training import progress_channel
from elasticjob.training.replicated.state import internals

progress_channel.channel.memory = tuple(memory_file("test") for _ in range(3))  # an agent's, for all States

device = torch.device("cuda", 0)

def commit(state, count):
    for _ in range(count):
        state.step += 1
        state.commit()

def make(mebibytes):
    network = torch.nn.ParameterList([torch.rand(mebibytes << 18, device=device)])
    return network, elasticjob.State(network=network)

def check(state):
    found = internals(state).copies
    assert len(found.registered) == 2
    for registration in found.registered.values():
        assert registration.settled.wait(30)
    assert all(torch.frombuffer(each, dtype=torch.uint8).is_pinned() for each in found.mapped.values())

network, state = make(64)
commit(state, 5)
check(state)
expected = network[0].detach().cpu()
network, state = make(64)
state.sync()
assert state.step == 5
assert torch.equal(network[0].detach().cpu(), expected)
commit(state, 2)
network.append(torch.rand(32 << 18, device=device))
commit(state, 3)
check(state)
assert all(len(each) > 96 << 20 for each in internals(state).copies.mapped.values())
print("registered")
"""


def test_commits_copy_to_memory_that_the_driver_has_registered(tmp_path: Path) -> None:
    """A State whose size has changed gets other memory there."""
    command = script(tmp_path, COMMITS_TO_REGISTERED_MEMORY)
    assert subprocess.check_output(command, text=True, timeout=100).strip() == "registered"


def ranks(run: LocalRun) -> dict[int, tuple[int, int, str]]:
    """Return (process id, first step, digest after five steps) by rank of the next round."""
    found: dict[int, tuple[int, int, str]] = {}
    while len(found) < 3:
        match = run.wait_for(r"rank (\d) pid (\d+) from (\d+) digest (\w+)")
        found[int(match[1])] = int(match[2]), int(match[3]), match[4]
    return found


@pytest.mark.timeout(300)
def test_all_ranks_have_one_state_after_a_killed_process_and_after_a_sticky_error(tmp_path: Path) -> None:
    """The digest covers parameters, moments and the random numbers of the GPU, which are alike on all ranks."""
    job = manifest(
        [*script(tmp_path, TRAINS), str(tmp_path)],
        replicas=3, preload=["torch", "torch._dynamo"], failurePolicy={"maxRestarts": 5},
    )  # fmt: skip
    with LocalRun(job, tmp_path) as run:
        first = ranks(run)
        os.kill(first[1][0], signal.SIGKILL)
        second = ranks(run)
        (tmp_path / "break-2").touch()
        third = ranks(run)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    for found in (first, second, third):
        assert len({digest for _, _, digest in found.values()}) == 1
        assert len({begin for _, begin, _ in found.values()}) == 1
    assert 0 == first[0][1] < second[0][1] < third[0][1], "no training from the beginning"
    assert {rank: second[rank][0] for rank in (0, 2)} == {rank: first[rank][0] for rank in (0, 2)}
    assert {rank: third[rank][0] for rank in (0, 1)} == {rank: second[rank][0] for rank in (0, 1)}
    assert third[2][0] != second[2][0], "a process whose device has failed is replaced"
