"""A training loop with the same samples and the same global batch at any number of workers.

Each sample is used once an epoch, also if nodes join, leave or fail in the middle of one.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticjob


def main() -> None:
    options = read_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)

    dataset = make_dataset(options.samples)
    sampler = elasticjob.ElasticSampler(dataset, seed=0)
    batches = elasticjob.microbatches(options.global_batch, sampler, max_size=options.max_size)
    loader = DataLoader(dataset, batch_sampler=batches)

    state = elasticjob.State(model=model, optimizer=optimizer, sampler=sampler, step=0, path=options.path)
    state.sync()  # load the newest state of any node, or of `path`
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
                counts = f"samples={used.item()} world={dist.get_world_size()} time={time.time():.4f}"
                print(f"step={state.step} epoch={epoch} loss={mean:.6f} {counts}", flush=True)
            if state.step % options.commit_every == 0:
                state.commit()  # with the position of the sampler
            elasticjob.progress(state.step)
            time.sleep(options.step_delay)
    dist.destroy_process_group()


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
    parser.add_argument("--path", help="file to which a drained node saves the state")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
