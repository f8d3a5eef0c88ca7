"""Training scripts that integration tests run as workers."""

from __future__ import annotations

import sys
from pathlib import Path

DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.AdamW(model.parameters())
steps, rank, world = 0, dist.get_rank(), dist.get_world_size()
stop = torch.zeros(1)
while not stop.item():
    optimizer.zero_grad()
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    steps += 1
    if rank == 0:
        stop.fill_(float(os.path.exists(sys.argv[1])))
    dist.broadcast(stop, 0)
    if steps in (1, 5):
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        line = f"step {steps} rank {rank} of {world} pid {os.getpid()} restart {restart}"
        print(f"{line} at {time.time():.4f}\\n", end="", flush=True)
    time.sleep(0.03)
dist.destroy_process_group()
"""
"""Trains until the file named by its argument exists; prints its first and fifth step of each round."""


def script(folder: Path, text: str, name: str = "script.py") -> list[str]:
    """Write a script to `folder` and return the command that runs it."""
    (folder / name).write_text(text)
    return [sys.executable, str(folder / name)]
