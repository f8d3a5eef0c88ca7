"""Commits a State of 1 GB of tensors, and copies as much between two tensors, in turns: what `commit-1gb` runs.

It prints the seconds of each pair. One thread does either; all memory has been written before. With the argument
`steps` it also makes steps of about a second, with and without a commit that goes on beside them, in turns: what
`commit-1gb-non-blocking` runs.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import elasticjob

GIGABYTE = 1_000_000_000
TENSORS = 8

torch.set_num_threads(1)
dist.init_process_group("gloo")
network = torch.nn.ParameterList(torch.rand(GIGABYTE // 4 // TENSORS) for _ in range(TENSORS))
optimizer = torch.optim.SGD(network.parameters())
state = elasticjob.State(network=network, optimizer=optimizer, step=0)
state.sync()
copies = [torch.zeros_like(part) for part in network]


def commit() -> None:
    state.step += 1
    state.commit()


def copy() -> None:
    with torch.no_grad():
        for to, part in zip(copies, network, strict=True):
            to.copy_(part)


def products(count: int) -> None:
    for _ in range(count):
        torch.mm(factor, factor, out=product)


def step(*, commits: bool) -> None:
    if commits:
        state.commit(non_blocking=True)
    products(per_second)  # stands for a forward and a backward pass
    optimizer.step()  # has no gradients: it only waits
    state.step += 1


def seconds(action: Callable[[], None]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


print(f"first commit={seconds(commit):.6f}", flush=True)
commit()
copy()
for _ in range(15):
    print(f"pair commit={seconds(commit):.6f} memcpy={seconds(copy):.6f}", flush=True)
if sys.argv[1:] == ["steps"]:
    factor, product = torch.rand(512, 512), torch.empty(512, 512)
    products(10)
    per_second = round(100 / seconds(lambda: products(100)))
    for _ in range(10):
        alone, beside = seconds(lambda: step(commits=False)), seconds(lambda: step(commits=True))
        print(f"steps alone={alone:.6f} beside={beside:.6f} memcpy={seconds(copy):.6f}", flush=True)
print("all commits measured", flush=True)
dist.destroy_process_group()
