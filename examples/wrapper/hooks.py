"""All hooks of `elasticjob.inprocess.Wrapper`, each as a class of your own. Two ranks train, and one is a spare.

torchrun --nproc-per-node=3 examples/wrapper/hooks.py
"""

from __future__ import annotations

import gc
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from elasticjob.inprocess import (
    Abort,
    AbortTorchDistributed,
    CallWrapper,
    Completion,
    FaultCounter,
    Finalize,
    HealthCheck,
    Initialize,
    MaxActiveWorldSize,
    RetryController,
    ShiftRanks,
    State,
    Terminate,
    ThreadedFinalize,
    Wrapper,
    compose,
)


def say(state: State, hook: str) -> None:
    """Print in one piece: several ranks write to the same terminal."""
    print(f"rank {state.initial_rank} iteration {state.iteration}: {hook}\n", end="", flush=True)


class AnnounceIteration(Initialize):
    """Prepares what an iteration needs. RetryController, which is composed with it, limits the iterations."""

    def __call__(self, state: State) -> None:
        say(state, f"initialize as {state.status.name}")


class AnnounceAbort(Abort):
    """Runs in the monitor thread while the function is still inside, so it must not wait for the main thread."""

    def __call__(self, state: State) -> None:
        say(state, "abort")


class AnnounceFinalize(Finalize):
    """Runs after the function has been left. ThreadedFinalize, composed with it, limits the time of another one."""

    def __call__(self, state: State, exception: Exception | None) -> None:
        say(state, f"finalize after {type(exception).__name__}")


class DiskIsWritable(HealthCheck):
    """Raises if this rank cannot take part in the next iteration."""

    def __call__(self, state: State, exception: Exception | None) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        say(state, "health check")


class AnnounceCompletion(Completion):
    """Runs once on each rank when all ranks have completed."""

    def __call__(self, state: State) -> None:
        say(state, "completion")


class AnnounceEnd(Terminate):
    """Runs on a rank that leaves with an exception."""

    def __call__(self, state: State) -> None:
        say(state, "terminate")


@Wrapper(
    initialize=compose(RetryController(max_iterations=5, min_active_world_size=2), AnnounceIteration()),
    abort=compose(AbortTorchDistributed(), AnnounceAbort()),
    finalize=compose(ThreadedFinalize(timedelta(seconds=10), gc.collect), AnnounceFinalize()),
    health_check=compose(FaultCounter(max_rank_faults=1), DiskIsWritable()),
    completion=AnnounceCompletion(),
    terminate=AnnounceEnd(),
    rank_assignment=ShiftRanks(),
    rank_filter=MaxActiveWorldSize(2),
    soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90),
)
def train(call: CallWrapper) -> float:
    """Add up numbers on two ranks. Rank 1 fails once."""
    dist.init_process_group("gloo")
    total = torch.zeros(())
    for step in range(5):
        if (dist.get_rank(), call.iteration, step) == (1, 0, 3):
            time.sleep(1)  # until the other rank waits for this one
            raise RuntimeError("a fault of rank 1")
        number = torch.ones(())
        dist.all_reduce(number)
        total += number
        call.ping()
    dist.destroy_process_group()
    return total.item()


if __name__ == "__main__":
    print(f"returned {train()}\n", end="", flush=True)
