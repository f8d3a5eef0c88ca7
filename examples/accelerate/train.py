"""A plain loop with Hugging Face's Accelerate, which continues in the same process when a rank is lost.

Each step has the same number of samples at any number of workers, and each sample is used once an epoch.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import elasticjob
from elasticjob.frameworks.accelerate_rounds import begin_accelerate_round


def main() -> None:
    options = read_options()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    adam = torch.optim.AdamW(network.parameters(), lr=3e-3)
    dataset = make_dataset(options.samples)
    sampler = elasticjob.ElasticSampler(dataset, seed=0)
    batches = elasticjob.microbatches(options.global_batch, sampler, max_size=options.max_size)
    state = elasticjob.State(network=network, optimizer=adam, sampler=sampler, step=0, path=options.path)

    @elasticjob.restartable
    def train() -> None:
        """Train in one round. It is called again in the next one; what is built above stays."""
        begin_accelerate_round()
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=1)
        network.to(accelerator.device)
        state.sync()  # before `prepare`, in which DDP copies the weights of rank 0 to the others
        model, optimizer = accelerator.prepare(network, adam)  # not the data loader: `batches` divides the samples
        loader = DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())
        while sampler.epoch < options.epochs:
            for step in batches.steps(loader):  # the rest of the epoch
                optimizer.zero_grad()
                loss = torch.zeros((), device=accelerator.device)
                for batch in step:
                    inputs, targets = (tensor.to(accelerator.device) for tensor in batch.data)
                    with batch.gradient_sync(model):  # only the last micro-batch averages gradients over the ranks
                        weighted = torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight
                        accelerator.backward(weighted)
                    loss += weighted.detach()
                optimizer.step()
                state.step += 1
                mean = accelerator.reduce(loss, "mean")  # the mean over the step's samples on all ranks
                if accelerator.is_main_process:
                    line = f"step={state.step} loss={mean.item():.6f} world={accelerator.num_processes}"
                    print(f"{line} pid={os.getpid()} time={time.time():.4f}", flush=True)
                if state.step % options.commit_every == 0:
                    state.commit()
                elasticjob.progress(state.step)
                time.sleep(options.step_delay)
        accelerator.end_training()

    train()


def make_dataset(samples: int) -> TensorDataset:
    """Return inputs of shape (samples, 16) and targets of shape (samples, 1), the same on every rank."""
    inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=500, help="samples of an epoch")
    parser.add_argument("--global-batch", type=int, default=24, help="samples of a step on all workers together")
    parser.add_argument("--max-size", type=int, default=8, help="samples of a forward pass on a worker, at most")
    parser.add_argument("--commit-every", type=int, default=20, help="steps between commits")
    parser.add_argument("--path", help="file to which the state is saved when the job ends, unless it succeeds")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
