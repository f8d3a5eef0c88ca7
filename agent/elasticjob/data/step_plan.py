"""Division of an epoch into steps, of a step among ranks, and of a rank's share into micro-batches. Pure.

Positions count the samples of an epoch in its order, from 0. A step takes the next `global_batch` positions. Rank r of
W ranks gets every W-th position of the step, from the r-th on. The positions that are done are therefore always the
first ones, whatever the world size was: one number describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedBatch:
    """A micro-batch: items `start` to `stop` of the rank's positions in a step. It can be empty."""

    start: int
    stop: int
    weight: float
    """Factor for the mean loss of the micro-batch. The gradient that DDP averages is then the mean over the step."""
    last: bool
    """Last micro-batch of the step: the ranks average their gradients in its backward pass."""


def step_sizes(remaining: int, global_batch: int) -> Iterator[int]:
    """Yield the number of samples of each step: `global_batch`, except for a smaller last step."""
    for start in range(0, remaining, global_batch):
        yield min(global_batch, remaining - start)


def rank_positions(start: int, stop: int, rank: int, world_size: int) -> range:
    """Return the rank's part of the positions `start` to `stop`. Sizes differ by at most one between ranks."""
    return range(start + rank, stop, world_size)


def micro_batch_count(samples: int, world_size: int, max_size: int | None) -> int:
    """Return the number of micro-batches of a step, which is the same on every rank: the largest share decides."""
    largest_share = -(-samples // world_size)
    return -(-largest_share // (max_size or largest_share))


def plan_step(samples: int, rank: int, world_size: int, max_size: int | None) -> tuple[PlannedBatch, ...]:
    """Divide the rank's part of a step of `samples` >= 1 samples into micro-batches of at most `max_size` samples.

    DDP divides the sum of the ranks' gradients by the world size, and a loss is usually the mean over its micro-batch.
    With weights of size * world_size / samples, each sample of the step contributes 1 / samples to the result.
    """
    count = micro_batch_count(samples, world_size, max_size)
    share = len(rank_positions(0, samples, rank, world_size))
    bounds = [share * i // count for i in range(count + 1)]
    return tuple(
        PlannedBatch(bounds[i], bounds[i + 1], (bounds[i + 1] - bounds[i]) * world_size / samples, i == count - 1)
        for i in range(count)
    )
