"""Micro-batches of a map-style dataset. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from elasticjob.data.loaders import begin_iteration, require, require_order
from elasticjob.data.sampler import ElasticSampler, EpochOrder
from elasticjob.data.step_plan import micro_batch_count, plan_step, rank_positions, step_sizes
from elasticjob.data.training_step import TrainingStep


class MicroBatchSampler(Sampler):  # type: ignore[misc]  # torch has no types here
    """The `batch_sampler` of a data loader: yields the indices of each micro-batch of this rank."""

    def __init__(self, global_batch: int, sampler: ElasticSampler, max_size: int | None) -> None:
        self._global_batch = global_batch
        self._sampler = sampler
        self._max_size = max_size

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: the position and the ranks are those of this call, which `steps` makes.
        sampler = self._sampler
        return self._batches(sampler.consumed, self._sizes(), sampler.order(), *sampler.ranks.current())

    def _batches(
        self, start: int, sizes: Iterator[int], order: EpochOrder, rank: int, world_size: int
    ) -> Iterator[list[int]]:
        for samples in sizes:
            positions = rank_positions(start, start + samples, rank, world_size)
            for planned in plan_step(samples, rank, world_size, self._max_size):
                # An empty batch has no mean loss. One sample of the step takes its place, with weight 0.
                yield order.indices(positions[planned.start : planned.stop] or range(start, start + 1))
            start += samples

    def _sizes(self) -> Iterator[int]:
        """Return the sizes of the remaining steps, from the position at the time of this call."""
        return step_sizes(self._sampler.length - self._sampler.consumed, self._global_batch)

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank in the rest of the epoch."""
        _, world_size = self._sampler.ranks.current()
        full, rest = divmod(self._sampler.length - self._sampler.consumed, self._global_batch)
        batches = full * micro_batch_count(self._global_batch, world_size, self._max_size)
        return batches + (micro_batch_count(rest, world_size, self._max_size) if rest else 0)

    def steps(self, loader: Any) -> Iterator[TrainingStep]:
        """Yield the remaining steps of the epoch; then the sampler is at the beginning of the next epoch.

        `loader`: a DataLoader or StatefulDataLoader with this object as its `batch_sampler`; ValueError for others.
        RuntimeError if a step's micro-batches are not all taken, or if other code moves the sampler meanwhile.
        """
        require(loader.batch_sampler is self, "create the data loader with batch_sampler=microbatches(...)")
        require_order(loader)
        rank, world_size = self._sampler.ranks.current()
        sizes, batches = self._sizes(), begin_iteration(loader, self._sampler)
        for samples in sizes:
            plan = plan_step(samples, rank, world_size, self._max_size)
            step = TrainingStep(self._sampler, samples, plan, batches)
            yield step
            step.check_finished()
        next(batches, None)  # the loader's own end: it reuses or stops its workers
