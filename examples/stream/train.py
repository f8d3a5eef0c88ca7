"""A training loop over a dataset that can only be iterated, with a batch that grows with the number of workers.

Each record is used once an epoch, also if nodes join, leave or fail in the middle of one. The learning rate follows
the number of workers, as the batch does.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elasticjob


class Records:
    """Yields the numbers of all records in an order that depends on the epoch only: it is the same in each process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self._epoch).sample(range(self._count), self._count)  # noqa: S311


def decode(record: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return (record, inputs, target). This is the costly part: it is called for the samples of this rank only."""
    inputs = torch.randn(16, generator=torch.Generator().manual_seed(record))
    return record, inputs, inputs.sin().sum(0, keepdim=True)


def main() -> None:
    options = read_options()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    elasticjob.scale_learning_rate(optimizer, base_world_size=2)  # lr is 0.01 * 0.99**step with two workers
    used = {}  # the scaled rate can be read within optimizer.step() only
    optimizer.register_step_pre_hook(lambda *_: used.update(lr=optimizer.param_groups[0]["lr"]))

    stream = elasticjob.ElasticIterable(Records(options.samples), transform=decode)
    state = elasticjob.State(
        network=network, optimizer=optimizer, scheduler=scheduler, stream=stream, step=0, path=options.path
    )

    @elasticjob.restartable
    def train() -> None:
        """Train in one round. It is called again in the next one; what is built above stays."""
        dist.init_process_group("gloo")
        state.sync()  # bring all ranks to the newest state of any of them, or of `path`
        model = DistributedDataParallel(network)
        batches = elasticjob.microbatches(options.batch * dist.get_world_size(), stream)
        loader = DataLoader(batches, batch_size=None, num_workers=options.loader_workers)
        where = f"world={dist.get_world_size()} rank={dist.get_rank()} pid={os.getpid()}"
        while stream.epoch < options.epochs:
            for step in batches.steps(loader):  # the rest of the epoch
                optimizer.zero_grad()
                records: list[int] = []
                for batch in step:
                    numbers, inputs, targets = batch.data
                    with batch.gradient_sync(model):
                        (torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight).backward()
                    records += numbers[: batch.samples].tolist()  # not the one that stands in for an empty batch
                records = of_all_ranks(records)
                optimizer.step()
                scheduler.step()
                # The end of a round can interrupt this function where `step` is assigned, but not before: each step
                # that counts has a line. A step that another rank has not completed is done again, with a new line.
                line = f"step={state.step + 1} epoch={stream.epoch} lr={used['lr']:.6f} {where}"
                print(f"{line} records={','.join(map(str, records))}", flush=True)
                state.step += 1
                elasticjob.progress(state.step)
                time.sleep(options.step_delay)
        dist.destroy_process_group()

    train()


def of_all_ranks(records: list[int]) -> list[int]:
    """Return the records of all ranks in this step."""
    found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, records)
    return [record for of_rank in found for record in of_rank]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=1000, help="samples of an epoch")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step on each worker")
    parser.add_argument("--loader-workers", type=int, default=2, help="processes of each data loader")
    parser.add_argument("--path", help="file to which a drained pod saves the state")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
