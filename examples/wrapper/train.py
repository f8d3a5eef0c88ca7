"""A training function that `elasticjob.inprocess.Wrapper` calls again after a fault, under torchrun or an ElasticJob.

torchrun --nproc-per-node=3 examples/wrapper/train.py --path=/tmp/wrapper.pt --raise-at=25
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticjob.inprocess import CallWrapper, FaultCounter, RetryController, Wrapper


def main() -> None:
    options = read_options()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    def save(step: int) -> None:
        new = options.path.with_suffix(".new")
        torch.save({"step": step, "network": network.state_dict(), "optimizer": optimizer.state_dict()}, new)
        new.replace(options.path)

    def restore() -> int:
        """Load the checkpoint; return its step. Ranks may have been interrupted at different steps."""
        kept = torch.load(options.path, weights_only=True)
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        return int(kept["step"])

    @Wrapper(
        initialize=RetryController(max_iterations=10),
        health_check=FaultCounter(max_rank_faults=3),
    )
    def train(call: CallWrapper) -> int:
        """Train in one iteration. It is called again, in the same process, after a fault of any rank."""
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank == 0 and not options.path.exists():
            save(0)
        dist.barrier()
        begin = restore()
        model = DistributedDataParallel(network)
        for step in range(begin + 1, options.steps + 1):
            if (step, call.iteration, rank) == (options.raise_at, 0, 1):
                time.sleep(1)  # until all others wait for this rank
                raise RuntimeError("a fault of rank 1, as --raise-at asks for")
            inputs = batch(step, rank)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            call.ping()  # optional: a rank that stops for longer than `soft_timeout` is restarted
            if rank == 0:
                line = f"step={step} loss={loss.item():.6f} world={dist.get_world_size()} iteration={call.iteration}"
                print(f"{line} pid={os.getpid()} time={time.time():.4f}", flush=True)
                if step % options.save_every == 0:
                    with call.atomic():  # not interrupted
                        save(step)
        dist.destroy_process_group()
        return options.steps - begin

    print(f"{train()} steps in the last iteration\n", end="", flush=True)


def batch(step: int, rank: int) -> torch.Tensor:
    """Return a rank's data of a step."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="checkpoint, on storage that all ranks see")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--raise-at", type=int, default=0, help="step at which rank 1 fails once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
