"""`@elasticjob.restartable` with nccl on a real GPU. Ranks share it: each claims to be a host of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

TRAINS = """
import os, sys, time
os.environ["NCCL_HOSTID"] = str(os.getpid())
os.environ["TORCH_DIST_USE_NCCL2"] = sys.argv[2]
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elasticjob

folder, calls = sys.argv[1], 0
device = torch.device("cuda", 0)
torch.manual_seed(0)
model = torch.nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@elasticjob.restartable(spare_process=len(sys.argv) > 3)
def train():
    global calls
    calls += 1
    begun = time.time()
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    formed = time.time()
    ddp = DistributedDataParallel(model, device_ids=[0])
    stop, steps = torch.zeros(1, device=device), 0
    while not stop.item():
        optimizer.zero_grad()
        ddp(torch.full((4, 256), float(rank + 1), device=device)).sum().backward()
        gradient, expected = model.weight.grad.mean().item(), 4 * sum(range(1, world + 1)) / world
        assert abs(gradient - expected) < 1e-3, f"wrong gradient {gradient}, not {expected}"
        optimizer.step()
        steps += 1
        if rank == 0:
            stop.fill_(float(os.path.exists(f"{folder}/done")))
        dist.broadcast(stop, 0)
        if steps == 3:
            print(f"rank {rank} of {world} pid {os.getpid()} call {calls} group {formed - begun:.3f}"
                  f" steps {time.time() - formed:.3f} at {time.time():.3f}\\n", end="", flush=True)
        if os.path.exists(f"{folder}/raise-{rank}"):
            os.unlink(f"{folder}/raise-{rank}")
            print(f"raising at {time.time():.3f}", flush=True)
            raise ValueError("bad batch")
        time.sleep(0.005)
    dist.destroy_process_group()

train()
"""


def processes(run: LocalRun) -> dict[int, tuple[int, int]]:
    """Return (process id, number of the call) by rank of the next round."""
    found: dict[int, tuple[int, int]] = {}
    while len(found) < 3:
        match = run.wait_for(r"rank (\d) of 3 pid (\d+) call (\d+)")
        found[int(match[1])] = int(match[2]), int(match[3])
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("nccl2", ["0", "1"])
@pytest.mark.parametrize("spare", [[], ["spare"]])
def test_processes_keep_their_gpu_context(spare: list[str], nccl2: str, tmp_path: Path) -> None:
    """`nccl` is another implementation from torch 2.15 on, unless a variable says otherwise.

    A spare process has formed a group of one rank with it before its round.
    """
    command = [*script(tmp_path, TRAINS), str(tmp_path), nccl2, *spare]
    job = manifest(command, replicas=3, preload=["torch", "torch._dynamo"])
    with LocalRun(job, tmp_path) as run:
        first = processes(run)
        (tmp_path / "raise-2").touch()
        second = processes(run)
        assert second == {rank: (pid, 2) for rank, (pid, _) in first.items()}
        waiting = [int(run.wait_for(r"process (\d+) waits at its function, as the spare")[1]) for _ in spare * 3]
        os.kill(second[1][0], signal.SIGKILL)
        third = processes(run)
        assert {rank: third[rank] for rank in (0, 2)} == {rank: (second[rank][0], 3) for rank in (0, 2)}
        assert third[1][1] == 1
        assert not spare or third[1][0] in waiting
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert "wrong gradient" not in run.text
    assert "will take longer" not in run.text
    print("\n".join(line for line in run.lines if " pid " in line or "raising" in line or "died" in line))
