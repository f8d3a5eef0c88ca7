"""A slow rank is distinguished from the ranks that wait for it, with real torch and gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob._runtime.contract.names import Env
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

TRAINS = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elasticjob

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
slow, stop, step = folder / f"slow-{dist.get_rank()}", torch.zeros(1), 0

def load():
    time.sleep(0.08 if slow.exists() else 0.03)
    return torch.randn(4, 10)

while not stop.item():
    optimizer.zero_grad()
    model(load()).sum().backward()
    optimizer.step()
    step += 1
    if dist.get_rank() == 0:
        stop.fill_(float((folder / "done").exists()))
    dist.broadcast(stop, 0)
    elasticjob.progress(step)
dist.destroy_process_group()
"""
"""A rank takes 50 ms longer to load its data while the file `slow-<rank>` exists."""


@pytest.mark.torch
def test_the_slow_rank_is_named_and_none_once_all_keep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.STEP_TIME_WINDOW_SECONDS, "1")
    job = manifest([*script(tmp_path, TRAINS), str(tmp_path)], replicas=2, preload=["torch", "torch._dynamo"])
    (tmp_path / "slow-1").touch()
    with LocalRun(job, tmp_path) as run:
        named = run.wait_for(r"rank (\d) on (\S+) holds up every step: (\d+) ms of its own, (\d+) ms", 120)
        assert named.group(1, 2) == ("1", "toy-1-0")
        assert int(named[3]) >= 60, "80 ms, minus one step in five or more that the window cuts off"
        (tmp_path / "slow-1").unlink()
        run.wait_for("all ranks keep up again")
        (tmp_path / "slow-0").touch()
        named = run.wait_for(r"rank (\d) on (\S+) holds up every step")
        assert named.group(1, 2) == ("0", "toy-0-0")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert "toy succeeded; 0 restarts" in run.text


OWN = """
import mmap, os, time
import torch
from torch.utils.checkpoint import checkpoint
from elasticjob._runtime.contract.shared_memory.progress_page import PageWord
from elasticjob.training import compute_time

words = memoryview(mmap.mmap(-1, 4096)).cast("q")
compute_time.measure(words)

class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.2)
        return grad

def step(layer=Waits.apply):
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    y.sum().backward()
    return x.grad

def own():
    return words[PageWord.OWN] / 1e9

def elapsed():
    return time.monotonic() - began

began = time.monotonic()
assert step().tolist() == [1, 1, 1]
assert own() == 0, "time before the first pass is not measured"
time.sleep(0.05)
torch.autograd.backward(torch.ones(1, requires_grad=True))
first = own()
assert 0.05 <= first <= elapsed() - 0.4, "two layers slept in a pass"
before = elapsed()
torch.autograd.backward(torch.ones(1, requires_grad=True))
first = own()
step()
second = own()
assert 0 < second - first <= elapsed() - before - 0.4, "time within a pass does not count, nested passes included"
if os.fork() == 0:
    step()
    os._exit(0)
os.wait()
assert own() == second, "a child's passes"
try:
    torch.ones(1).backward()
except RuntimeError:
    pass
assert own() > second
torch.ones(1, requires_grad=True, device="meta").sum().backward()
third = own()
step()
assert own() == third, "when another device is done is not known"
print("done")
"""
"""Every layer takes 0.2 s in its backward pass, and reentrant checkpoints nest backward passes."""


@pytest.mark.torch
def test_only_what_lies_between_backward_passes_is_a_ranks_own() -> None:
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
