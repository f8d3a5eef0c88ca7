"""Trains two equal models in turns, one without a State and one in a State, and prints the seconds of their steps.

The loops never wait for the device. Arguments: the seconds that a step takes at least, and `small` for a rehearsal.
"""

import sys
import time
from typing import Any

from benchmarks.gpu.device import CUDA, DEVICE, init_group, synchronize, write_line

# isort: split
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticjob
from benchmarks.gpu.model import Model

SECONDS, SMALL = float(sys.argv[1]), "small" in sys.argv[2:]
BLOCKS, STEPS = (3, 3) if SMALL else (6, 12)
"""Blocks of each kind, and the steps of one, after which the loop waits for the device."""
LARGEST_BATCH = 1 << 14


def wrapped(model: Model) -> Any:
    return DistributedDataParallel(model.network, device_ids=[0] if CUDA else None)


def block(model: Model, network: Any, counter: Any) -> float:
    """Return the seconds of a step, of a block that begins together on all ranks."""
    dist.barrier()
    synchronize()
    begun = time.perf_counter()
    for _ in range(STEPS):
        model.step(network)
        counter.step += 1
    synchronize()
    return (time.perf_counter() - begun) / STEPS


class Counter:
    step = 0


torch.set_num_threads(1)
plain, watched = Model(small=SMALL), Model(small=SMALL)
state = elasticjob.State(network=watched.network, optimizer=watched.optimizer, step=0)


@elasticjob.restartable  # updates are guarded in a process whose collectives may be broken while it goes on
def train() -> None:
    init_group()
    state.sync()
    plain_network, watched_network, counter = wrapped(plain), wrapped(watched), Counter()
    while True:  # warms up too
        block(plain, plain_network, counter)
        longest = torch.tensor(block(plain, plain_network, counter), device=DEVICE)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        if longest.item() >= SECONDS or plain.batch >= LARGEST_BATCH:
            break
        plain.batch *= 2
    watched.batch = plain.batch
    block(watched, watched_network, state)
    for _ in range(BLOCKS):
        pair = block(plain, plain_network, counter), block(watched, watched_network, state)
        if dist.get_rank() == 0:
            write_line(f"block plain={pair[0]:.6f} watched={pair[1]:.6f} batch={plain.batch}")
    if dist.get_rank() == 0:
        write_line("all blocks measured")
    dist.barrier()


train()
