"""The training of `train.py` under torchft: one replica group of one rank in each process.

The script prints the same events, and only steps that all replica groups have committed; `call` is the number of
quorums since the start of the process. A folder is its only argument; REPLICA_GROUP_ID is the rank.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torchft
from torch import nn

FOLDER, RANK, PID = sys.argv[1], os.environ["REPLICA_GROUP_ID"], os.getpid()
call, members = 1, 0


def log(event: str) -> None:
    sys.stdout.write(f"{event} rank={RANK} world={members} pid={PID} call={call} at={time.time():.6f}\n")
    sys.stdout.flush()


log("begun")
torch.set_num_threads(1)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def load(state: dict[str, Any]) -> None:
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])


def save() -> dict[str, Any]:
    return {"network": network.state_dict(), "optimizer": optimizer.state_dict()}


manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=1)),
    load_state_dict=load,
    state_dict=save,
    min_replica_size=1,
    replica_id=f"bench_{RANK}",
    timeout=timedelta(seconds=5),
    heartbeat_interval=timedelta(milliseconds=50),
)
model = torchft.DistributedDataParallel(manager, network)
optimizer = torchft.Optimizer(manager, torch.optim.AdamW(network.parameters()))
log("imported")
stuck, raising = (os.path.join(FOLDER, f"{action}-{RANK}") for action in ("stuck", "raise"))  # noqa: PTH118
done = 0
while True:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,)))
    loss.backward()
    before = manager.current_step()
    optimizer.step()
    if manager.current_step() > before:  # committed by all replica groups
        if manager.num_participants() != members:
            call, members, done = call + 1, manager.num_participants(), 0
        done += 1
        if RANK == "0" or done <= 3:
            log(f"step={manager.current_step()}")
    time.sleep(0.01)  # stands for work on a device: it leaves the cores to the recovery
    if os.path.exists(raising):  # noqa: PTH110
        os.unlink(raising)  # noqa: PTH108
        log("raising")
        raise RuntimeError("requested by the benchmark")
    if os.path.exists(stuck):  # noqa: PTH110
        log("stopped")
        while True:
            signal.pause()
