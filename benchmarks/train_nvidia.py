"""The training of `train.py` under the in-process `Wrapper` of NVIDIA's resiliency extension.

The model, the optimizer and the step number live outside of the wrapped function and survive its restarts. The script
prints the same events; `call` is the number of the function's call in this process. A folder is its only argument.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER, PID = sys.argv[1], os.getpid()
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
torch.set_num_threads(1)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(network.parameters())
progress = {"step": 0}


def log(event: str, call: int) -> None:
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    sys.stdout.write(f"{event} rank={rank} world={world} pid={PID} call={call} at={time.time():.6f}\n")
    sys.stdout.flush()


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def train(store: dist.Store, call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    call = call_wrapper.iteration + 1
    log("begun", call)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = dist.PrefixStore(str(call), store)
    # The library cannot abort gloo's collectives: a rank that waits for a live peer leaves them after this time.
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=seconds(1))
    log("imported", call)  # as in `train.py`: what comes next is the first step
    model = DistributedDataParallel(network)
    stuck, raising = (os.path.join(FOLDER, f"{action}-{rank}") for action in ("stuck", "raise"))  # noqa: PTH118
    done = 0
    while True:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,)))
        loss.backward()
        optimizer.step()
        progress["step"] += 1
        done += 1
        if rank == 0 or done <= 3:
            log(f"step={progress['step']}", call)
        time.sleep(0.01)  # stands for work on a device: it leaves the cores to the recovery
        if os.path.exists(raising):  # noqa: PTH110
            os.unlink(raising)  # noqa: PTH108
            log("raising", call)
            raise RuntimeError("requested by the benchmark")
        if os.path.exists(stuck):  # noqa: PTH110
            log("stopped", call)
            while True:
                signal.pause()


wrapper = inprocess.Wrapper(
    store_kwargs={"port": PORT + 1},  # the training's own store has the port itself
    monitor_thread_interval=seconds(0.1),
    monitor_process_interval=seconds(0.02),
    heartbeat_interval=seconds(0.1),
    heartbeat_timeout=seconds(1),
    progress_watchdog_interval=seconds(0.1),
    soft_timeout=seconds(1),
    hard_timeout=seconds(2),
    last_call_wait=seconds(0.02),
    termination_grace_time=seconds(0.5),
)
store = dist.TCPStore(HOST, PORT, int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0", multi_tenant=True)
wrapper(train)(store)
