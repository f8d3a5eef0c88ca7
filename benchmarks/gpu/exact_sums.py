"""Trains with small integers as gradients, so that the weights of each step are known, and prints how far they are off.

The average of the ranks' gradients is the same with two and with three ranks, and all sums are exact in float32.
Arguments: `ahead` (the loop never waits for the device) or `item` (it reads the loss once `step` is assigned), and the
elements of each parameter.
"""

import os
import sys

from benchmarks.gpu.device import CUDA, DEVICE, init_group, write_line

# isort: split
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticjob
from elasticjob._runtime.contract.names import Env

MODE, SIZE = sys.argv[1], int(sys.argv[2])
WORLDS = 6
"""A multiple of each size of the world: DDP divides before it adds."""
OFFSETS = (3, -3, 0)
"""By rank. Their sum is 0 with two and with three ranks; without one of the ranks it is not."""
SOON = 5
"""Steps of a call after which it says that it runs."""


def gradient(step: int, rank: int) -> int:
    return WORLDS * ((step * 7) % 11 + OFFSETS[rank])


def expected(step: int) -> float:
    """Return what each weight is after so many steps with a learning rate of 1."""
    return float(-sum(WORLDS * ((s * 7) % 11) for s in range(step)))


class Network(torch.nn.Module):  # type: ignore[misc]
    """Its loss is the sum of all weights times its input, which thus is the gradient of each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(SIZE, device=DEVICE)) for _ in range(4))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * factor).sum() for part in self.parts]).sum()


torch.set_num_threads(1)
network = Network()
optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
state = elasticjob.State(network=network, optimizer=optimizer, step=0)


@elasticjob.restartable
def train() -> None:
    init_group()
    had = state.step
    state.sync()
    rank, begin = dist.get_rank(), state.step
    error = max((part.detach() - expected(begin)).abs().max().item() for part in network.parts)
    weights = sum(part.detach().double().sum().item() for part in network.parts)
    where = f"rank={rank} world={dist.get_world_size()} pid={os.getpid()} round={os.environ[Env.ROUND]}"
    write_line(f"CHECK {where} step={begin} had={had} error={error:g} weights={weights:.17g}")
    if begin == 0:
        state.commit()
    ddp = DistributedDataParallel(network, device_ids=[0] if CUDA else None)
    while True:
        optimizer.zero_grad()
        factor = torch.tensor(float(gradient(state.step, rank))).to(DEVICE, non_blocking=True)
        loss = ddp(factor)
        loss.backward()
        optimizer.step()
        state.step += 1
        if MODE == "item":
            loss.item()
        elasticjob.progress(state.step)
        if state.step == begin + SOON:
            write_line(f"RUNS {where}")


train()
