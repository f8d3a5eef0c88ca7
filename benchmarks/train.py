"""The script that both sides run, unmodified: DDP over gloo with AdamW on a small network.

Prints when its first line ran, when torch was imported, and each of its steps (rank 0: all, others: the first three).
A file `stuck-RANK` in the folder of its argument makes that rank stop for ever, `raise-RANK` raise an exception.
A second argument: reports steps.
"""

import os
import signal
import sys
import time

RANK, PID = os.environ["RANK"], os.getpid()


def say(what: str) -> None:
    # One write: the ranks share a pipe.
    sys.stdout.write(f"{what} rank={RANK} world={os.environ['WORLD_SIZE']} pid={PID} at={time.time():.6f}\n")
    sys.stdout.flush()


say("begun")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

say("imported")
torch.set_num_threads(1)
dist.init_process_group("gloo")
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters())
if reports := bool(sys.argv[2:]):
    from elasticjob import progress
stuck, raising = (os.path.join(sys.argv[1], f"{what}-{RANK}") for what in ("stuck", "raise"))  # noqa: PTH118
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
        say(f"step={step}")
    time.sleep(0.01)  # as a device would compute: it leaves the processors to whoever recovers
    if os.path.exists(raising):  # noqa: PTH110
        os.unlink(raising)  # noqa: PTH108
        say("raising")
        raise RuntimeError("as asked")
    if os.path.exists(stuck):  # noqa: PTH110
        say("stopped")
        while True:
            signal.pause()  # it returns after a signal that asks for stacks
