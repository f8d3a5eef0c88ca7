"""The training of `train.py` in a function that survives the end of a round, with its state in `elasticjob.State`.

It prints the same events; `call` is the number of the function's call in this process. Arguments: a folder, how many
bytes the State has besides the model that is trained (0), whether each rank has a spare process (0), whether these
bytes are frozen parameters that the State leaves to the script (0), and seconds that a process takes to start (0).
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticjob

FOLDER, PID = sys.argv[1], os.getpid()
BYTES, SPARE_PROCESS, FROZEN, START = (int(argument) for argument in [*sys.argv[2:], "0", "0", "0", "0"][:4])
PART = 100_000_000
torch.set_num_threads(1)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(network.parameters())
ballast = nn.ParameterList(torch.rand(PART // 4) for _ in range(BYTES // PART)).requires_grad_(not FROZEN)
state = elasticjob.State(network=network, ballast=ballast, optimizer=optimizer, step=0, frozen_parameters=not FROZEN)
time.sleep(START)  # stands for a model that is built or data that is read before the function
calls = 0
held = b""


def log(event: str) -> None:
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    sys.stdout.write(f"{event} rank={rank} world={world} pid={PID} call={calls} at={time.time():.6f}\n")
    sys.stdout.flush()


def _hold_memory(path: str) -> bytes:
    try:
        with open(path) as file:
            size = int(file.read())
    except FileNotFoundError:
        return b""
    os.unlink(path)  # noqa: PTH108
    return b"x" * size


@elasticjob.restartable(spare_process=bool(SPARE_PROCESS))
def train() -> None:
    global calls, held
    calls += 1
    log("begun")
    dist.init_process_group("gloo")
    state.sync()
    log("imported")  # as in `train.py`: what comes next is the first step
    model = DistributedDataParallel(network, init_sync=False)  # `sync` has brought all ranks to one state
    rank, done = dist.get_rank(), 0
    held = held or _hold_memory(os.path.join(FOLDER, f"memory-{rank}"))  # noqa: PTH118
    stuck, raising = (os.path.join(FOLDER, f"{action}-{rank}") for action in ("stuck", "raise"))  # noqa: PTH118
    while True:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,)))
        loss.backward()
        optimizer.step()
        state.step += 1
        done += 1
        if rank == 0 or done <= 3:
            log(f"step={state.step}")
        elasticjob.progress(state.step)
        time.sleep(0.01)  # stands for work on a device: it leaves the cores to the recovery
        if os.path.exists(raising):  # noqa: PTH110
            os.unlink(raising)  # noqa: PTH108
            log("raising")
            raise RuntimeError("requested by the benchmark")
        if os.path.exists(stuck):  # noqa: PTH110
            log("stopped")
            while True:
                signal.pause()  # it returns after the signal that dumps stacks


train()
