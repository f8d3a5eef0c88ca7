"""Rounds of NCCL process groups. Ranks share one GPU: each claims to be a host of its own, which NCCL accepts."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

TRAINS = """
import os, sys, time
os.environ["NCCL_HOSTID"] = str(os.getpid())
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

start = time.time()
torch.cuda.set_device(0)
torch.zeros(1).cuda()
context = time.time()
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
group = time.time()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
module = torch.nn.Linear(256, 256).cuda()
model = DistributedDataParallel(module, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stop = torch.zeros(1, device="cuda")
steps = 0
while not stop.item():
    optimizer.zero_grad()
    inputs = torch.full((4, 256), float(rank + 1), device="cuda")
    model(inputs).sum().backward()
    torch.cuda.synchronize()
    expected = 4.0 * sum(range(1, world + 1)) / world
    assert abs(module.weight.grad.mean().item() - expected) < 1e-3, (module.weight.grad.mean().item(), expected)
    optimizer.step()
    steps += 1
    if rank == 0:
        stop.fill_(float(os.path.exists(sys.argv[1])))
    dist.broadcast(stop, 0)
    if steps in (1, 5):
        print(f"step {steps} rank {rank} of {world} pid {os.getpid()} restart"
              f" {os.environ['TORCHELASTIC_RESTART_COUNT']} context {context - start:.2f} group {group - context:.2f}"
              f" step {time.time() - group:.2f} at {time.time():.3f}", flush=True)
    time.sleep(0.005)
dist.destroy_process_group()
"""


def test_a_killed_worker_costs_one_round_of_nccl(tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = manifest([*script(tmp_path, TRAINS), str(done)], replicas=2, preload=["torch", "torch._dynamo"])
    with LocalRun(job, tmp_path) as run:
        pid = int(run.wait_for(r"step 5 rank 1 of 2 pid (\d+) restart 0")[1])
        os.kill(pid, signal.SIGKILL)
        assert int(run.wait_for(r"step 5 rank 1 of 2 pid (\d+) restart 1")[1]) != pid
        done.touch()
        assert run.exit_code() == 0, run.text
    assert re.search(r"rank 1 died: SIGKILL", run.text)
