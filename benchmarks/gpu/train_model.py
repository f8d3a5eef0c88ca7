"""Trains transformer layers with DDP, bf16 autocast and AdamW, and prints each step once the device has done it.

The events are those of `benchmarks/train_in_process.py`. In the folder of the first argument, a file `raise-RANK` makes
that rank raise an exception. Options: `plain` (the function is not restartable, and there is no State), `spare` (each
rank has a spare process), `small` (a model for a rehearsal on CPUs).
"""

import os
import sys
import time

from benchmarks.gpu.device import CUDA, init_group, synchronize, write_line

# isort: split
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.model import Model

FOLDER, OPTIONS = sys.argv[1], set(sys.argv[2:])
torch.set_num_threads(1)
calls = 0


def log(event: str) -> None:
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    write_line(f"{event} rank={rank} world={world} pid={os.getpid()} call={calls} at={time.time():.6f}")


model = Model(small="small" in OPTIONS)
state = None
if "plain" not in OPTIONS:
    import elasticjob

    state = elasticjob.State(network=model.network, optimizer=model.optimizer, step=0)


def train() -> None:
    global calls
    calls += 1
    log("begun")
    init_group()
    if state is not None:
        state.sync()
    synchronize()
    log("imported")  # what comes next is the first step
    ddp = DistributedDataParallel(model.network, device_ids=[0] if CUDA else None, init_sync=state is None)
    raising = os.path.join(FOLDER, f"raise-{dist.get_rank()}")  # noqa: PTH118
    step = 0
    while True:
        model.step(ddp)
        step += 1
        if state is not None:
            state.step += 1
            elasticjob.progress(state.step)
        synchronize()
        log(f"step={step if state is None else state.step}")
        if not CUDA:
            time.sleep(0.01)  # stands for work on a device: it leaves the cores to the recovery
        if os.path.exists(raising):  # noqa: PTH110
            os.unlink(raising)  # noqa: PTH108
            log("raising")
            raise RuntimeError("requested by the benchmark")


if state is None:
    train()
else:
    elasticjob.restartable(spare_process="spare" in OPTIONS)(train)()
