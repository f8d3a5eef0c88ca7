"""A training loop that loses no step when nodes join or leave, by `elasticjob.State` and `elasticjob.progress`."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticjob


def main() -> None:
    options = read_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    state = elasticjob.State(model=model, optimizer=optimizer, step=0, path=options.path)
    state.sync()  # load the newest state of any node, or of `path`
    while state.step < options.steps:
        inputs = batch(state.step).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        state.step += 1
        line = f"step={state.step} loss={loss.item():.4f} world={dist.get_world_size()} rank={dist.get_rank()}"
        print(f"{line} time={time.time():.4f}", flush=True)
        if state.step % options.commit_every == 0:
            state.commit()  # a crash loses only the steps after the last commit
        elasticjob.progress(state.step)  # if the round ends on plan, all ranks commit and stop here after the same step
        time.sleep(options.step_delay)
    dist.destroy_process_group()


def batch(step: int) -> torch.Tensor:
    """Return this rank's data of a step. It depends on step and rank only, so a repeated step gets the same data."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(32, 16, generator=generator)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--commit-every", type=int, default=20, help="steps between commits")
    parser.add_argument("--path", help="file to which a drained pod, and a job that fails, saves the state")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
