"""A training function that goes on in the same process when another rank is lost: `elasticjob.restartable`."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticjob

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


def main() -> None:
    options = read_options()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    state = elasticjob.State(network=network, optimizer=optimizer, step=0, path=options.path)

    @elasticjob.restartable
    def train() -> None:
        """Train in one round. It is called again in the next one; what is built above stays."""
        dist.init_process_group("nccl" if CUDA else "gloo")
        state.sync()  # bring all ranks to the newest state of any of them
        model = DistributedDataParallel(network)
        while state.step < options.steps:
            inputs = batch(state.step).to(DEVICE)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            state.step += 1
            line = f"step={state.step} loss={loss.item():.6f} world={dist.get_world_size()} rank={dist.get_rank()}"
            print(f"{line} pid={os.getpid()} time={time.time():.4f}", flush=True)
            elasticjob.progress(state.step)
            time.sleep(options.step_delay)
        dist.destroy_process_group()

    train()


def batch(step: int) -> torch.Tensor:
    """Return this rank's data of a step. It depends on step and rank only, so a repeated step gets the same data."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(32, 16, generator=generator)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--path", help="file to which the state is saved when the job ends, unless it succeeds")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
