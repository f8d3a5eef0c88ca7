"""What a process does once, in its first round and step, done ahead by a process that waits for its round.

A fork shares its memory with the fork server until it writes there, and torch, its backends and drivers set up much
when it is first used. In a round, all other ranks would wait for that.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def warm_up() -> None:
    """Form a group of one rank and reduce gradients of a small model: on the CPU, and on the GPU if the script uses it.

    The caller leaves the group. Nothing else is left: the generators that a script seeds are as before, and no step of
    an optimizer is counted. What fails is only reported, to stderr: the round may not need it.
    """
    uses_gpu = torch.cuda.is_initialized() and dist.is_nccl_available()
    try:
        backend = "cpu:gloo,cuda:nccl" if uses_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for device in ["cpu", "cuda"] if uses_gpu else ["cpu"]:
                _reduce_gradients(device)
    except Exception as error:
        sys.stderr.write(f"elasticjob: the first round of this process will take longer: {error}\n")


def _reduce_gradients(device: str) -> None:
    """Run both passes of a model on the device. The script may have set another default for devices and types."""
    network = torch.nn.Linear(4, 4, dtype=torch.float32, device="cpu").to(device)
    model = DistributedDataParallel(network)
    inputs = torch.ones(4, 4, dtype=torch.float32, device=device)
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    dist.all_gather([torch.zeros_like(labels)], labels)
