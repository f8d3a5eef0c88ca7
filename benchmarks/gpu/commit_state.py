"""Commits a State on the device, and prints the seconds of each commit, and of steps with and without one beside them.

Arguments: bytes of the State, and the seconds that a step takes.
"""

import sys
import time
from collections.abc import Callable

from benchmarks.gpu.device import CUDA, DEVICE, init_group, synchronize, write_line

# isort: split
import torch

import elasticjob

BYTES, SECONDS = int(sys.argv[1]), float(sys.argv[2])
TENSORS = 8
COMMITS = 16
REGISTRATION = 0.25 if CUDA else 0.0
"""Seconds between two commits: memory is registered with the driver beside them, about a second for 2 GiB."""
PAIRS = 12
"""Steps of each kind."""

torch.set_num_threads(1)
init_group()
network = torch.nn.ParameterList(torch.rand(BYTES // 4 // TENSORS, device=DEVICE) for _ in range(TENSORS))
optimizer = torch.optim.SGD(network.parameters())
state = elasticjob.State(network=network, optimizer=optimizer, step=0)
state.sync()
width, kind = (4096, torch.bfloat16) if CUDA else (256, torch.float32)
factor = torch.randn(width, width, device=DEVICE, dtype=kind)
product = torch.empty_like(factor)


def seconds(action: Callable[[], None]) -> float:
    synchronize()
    begun = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - begun


def commit() -> None:
    state.step += 1
    state.commit()


def products(count: int) -> None:
    for _ in range(count):
        torch.mm(factor, factor, out=product)


def step(*, commits: bool) -> None:
    if commits:
        state.commit(non_blocking=True)
    products(per_step)  # stands for a forward and a backward pass
    optimizer.step()  # has no gradients: it only waits for the commit
    state.step += 1


for number in range(COMMITS):
    write_line(f"commit {number} seconds={seconds(commit):.6f}")
    time.sleep(REGISTRATION)
products(20)
per_step = max(1, round(20 * SECONDS / seconds(lambda: products(20))))
step(commits=True)
for _ in range(PAIRS):
    alone, beside = seconds(lambda: step(commits=False)), seconds(lambda: step(commits=True))
    write_line(f"steps alone={alone:.6f} beside={beside:.6f}")
write_line("all commits measured")
