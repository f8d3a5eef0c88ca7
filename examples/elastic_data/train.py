"""A training loop with the same samples and the same global batch at any number of workers.

Each sample is used once an epoch, also if nodes join, leave or fail in the middle of one.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticjob


def main() -> None:
    options = read_options()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    dataset = make_dataset(options.samples)
    sampler = elasticjob.ElasticSampler(dataset, seed=0)
    batches = elasticjob.microbatches(options.global_batch, sampler, max_size=options.max_size)
    state = elasticjob.State(network=network, optimizer=optimizer, sampler=sampler, step=0, path=options.path)

    @elasticjob.restartable
    def train() -> None:
        """Train in one round. It is called again in the next one; what is built above stays."""
        dist.init_process_group("gloo")
        state.sync()  # bring all ranks to the newest state of any of them, or of `path`
        model = DistributedDataParallel(network)
        loader = DataLoader(dataset, batch_sampler=batches)
        while sampler.epoch < options.epochs:
            epoch = sampler.epoch
            for step in batches.steps(loader):  # the rest of the epoch
                optimizer.zero_grad()
                loss, used = torch.zeros(()), torch.zeros((), dtype=torch.int64)
                for batch in step:
                    inputs, targets = batch.data
                    with batch.gradient_sync(model):  # only the last micro-batch averages gradients over the ranks
                        weighted = torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight
                        weighted.backward()
                    loss += weighted.detach()
                    used += batch.samples
                optimizer.step()
                dist.all_reduce(loss)
                dist.all_reduce(used)
                state.step += 1
                if dist.get_rank() == 0:
                    mean = loss.item() / dist.get_world_size()  # the mean over the step's samples on all ranks
                    line = f"step={state.step} epoch={epoch} samples={used.item()} loss={mean:.6f}"
                    print(f"{line} world={dist.get_world_size()} pid={os.getpid()} time={time.time():.4f}", flush=True)
                if state.step % options.commit_every == 0:
                    state.commit()  # with the position of the sampler
                elasticjob.progress(state.step)
                time.sleep(options.step_delay)
        dist.destroy_process_group()

    train()


def make_dataset(samples: int) -> TensorDataset:
    """Return inputs of shape (samples, 16) and targets of shape (samples, 1), the same on every rank."""
    inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=1000, help="samples of an epoch")
    parser.add_argument("--global-batch", type=int, default=96, help="samples of a step on all workers together")
    parser.add_argument("--max-size", type=int, default=32, help="samples of a forward pass on a worker, at most")
    parser.add_argument("--commit-every", type=int, default=5, help="steps between commits")
    parser.add_argument("--path", help="file to which a drained pod saves the state")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
