"""The script that both sides run, unmodified: DDP over gloo with AdamW on a small network.

It prints when its first line runs, when torch is imported, and its steps (rank 0: all, other ranks: the first three).
In the folder of the first argument, a file `stuck-RANK` makes that rank stop for ever, a file `raise-RANK` makes it
raise an exception, and a file `memory-RANK` makes its first process hold as many bytes as the file says. With a second
argument the script reports its steps to the agent.
"""

import os
import signal
import sys
import time

RANK, PID = os.environ["RANK"], os.getpid()


def log(event: str) -> None:
    # One write, because the ranks share a pipe.
    sys.stdout.write(f"{event} rank={RANK} world={os.environ['WORLD_SIZE']} pid={PID} at={time.time():.6f}\n")
    sys.stdout.flush()


def _hold_memory(folder: str) -> bytes:
    try:
        with open(os.path.join(folder, f"memory-{RANK}")) as file:  # noqa: PTH118
            size = int(file.read())
    except FileNotFoundError:
        return b""
    os.unlink(file.name)  # noqa: PTH108
    return b"x" * size


log("begun")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

log("imported")
torch.set_num_threads(1)
dist.init_process_group("gloo")
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters())
held = _hold_memory(sys.argv[1])
if reports := bool(sys.argv[2:]):
    from elasticjob import progress
stuck, raising = (os.path.join(sys.argv[1], f"{action}-{RANK}") for action in ("stuck", "raise"))  # noqa: PTH118
step = 0
while True:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,)))
    loss.backward()
    optimizer.step()
    step += 1
    if reports:
        progress(step)
    if RANK == "0" or step <= 3:
        log(f"step={step}")
    time.sleep(0.01)  # stands for work on a device: it leaves the cores to the recovery
    if os.path.exists(raising):  # noqa: PTH110
        os.unlink(raising)  # noqa: PTH108
        log("raising")
        raise RuntimeError("requested by the benchmark")
    if os.path.exists(stuck):  # noqa: PTH110
        log("stopped")
        while True:
            signal.pause()  # it returns after the signal that dumps stacks
