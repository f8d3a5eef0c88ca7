"""Train a function in elastic workers on this machine, and get what it returns: `python examples/launch/train.py`."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticjob


def train(steps: int) -> tuple[int, float]:
    """Train in a worker. Return the world size and the last loss, which is the same on all ranks."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = torch.zeros(())
    for step in range(1, steps + 1):
        inputs = torch.randn(16, 4)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= world
        elasticjob.progress(step)
    dist.destroy_process_group()
    return world, mean.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="pods, each an agent with its workers")
    parser.add_argument("--workers", type=int, default=1, help="workers of a pod")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    result = elasticjob.launch(train, options.steps, nodes=options.nodes, nproc_per_node=options.workers)
    if result.state is not elasticjob.WorkerState.SUCCEEDED:
        for rank, failure in result.failures.items():
            print(f"rank {rank}: {failure.exception}: {failure.message}", file=sys.stderr)
        return 1
    for rank, (world, loss) in result.return_values.items():
        print(f"rank {rank} of {world}: loss {loss:.4f}")
    return 0


if __name__ == "__main__":  # the workers import this module
    sys.exit(main())
