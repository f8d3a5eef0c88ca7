"""Micro-batches of an iterable dataset. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, default_convert

from elasticjob.data.iterable import ElasticIterable, data_loader_worker
from elasticjob.data.loaders import begin_iteration, require, require_order
from elasticjob.data.step_plan import plan_step
from elasticjob.data.training_step import TrainingStep

Collate = Callable[[list[Any]], Any]


class MicroBatchStream(IterableDataset):  # type: ignore[misc]  # torch has no types here
    """The dataset of a data loader with `batch_size=None`: yields each micro-batch of this rank, collated.

    Every worker of the data loader plans all micro-batches and yields those of its turn: the loader takes one item of
    each worker in turn. An item is (samples of the step on all ranks, batch), because only the reader of the dataset
    knows how many samples its last step has.
    """

    def __init__(
        self, global_batch: int, source: ElasticIterable, max_size: int | None, collate_fn: Collate | None
    ) -> None:
        self._global_batch = global_batch
        self._source = source
        self._max_size = max_size
        self._collate: Collate = collate_fn or default_collate

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        worker, workers = data_loader_worker()
        return (
            (samples, self._collate([self._source.transformed(sample) for sample in batch]))
            for samples, batch in islice(self._batches(), worker, None, workers)
        )

    def _batches(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield (samples of the step on all ranks, samples of the micro-batch before the transform)."""
        rank, world_size = self._source.ranks.current()
        remaining = self._source.remaining()
        while True:
            samples, first, mine = _read_step(islice(remaining, self._global_batch), rank, world_size)
            if not samples:
                return
            for planned in plan_step(samples, rank, world_size, self._max_size):
                # An empty batch has no mean loss. One sample of the step takes its place, with weight 0.
                yield samples, mine[planned.start : planned.stop] or [first]

    def steps(self, loader: Any) -> Iterator[TrainingStep]:
        """Yield the remaining steps of the epoch; then the source is at the beginning of the next epoch.

        `loader`: a DataLoader or StatefulDataLoader of this object with `batch_size=None`; ValueError for others.
        RuntimeError if a step's micro-batches are not all taken, or if other code moves the source meanwhile.
        """
        require(loader.dataset is self, "create the data loader with microbatches(...) as its dataset")
        require(loader.batch_size is None, "create it with batch_size=None, because its items are batches already")
        require(loader.collate_fn is default_convert, "pass collate_fn to microbatches(...) instead")
        require(not loader.persistent_workers, "persistent workers do not see that the position moves")
        require_order(loader)
        rank, world_size = self._source.ranks.current()
        items = begin_iteration(loader, self._source)
        for samples, batch in items:
            plan = plan_step(samples, rank, world_size, self._max_size)
            step = TrainingStep(self._source, samples, plan, chain([batch], (batch for _, batch in items)))
            yield step
            step.check_finished()
        self._source.set_epoch(self._source.epoch + 1)


def _read_step(step: Iterator[Any], rank: int, world_size: int) -> tuple[int, Any, list[Any]]:
    """Return the number of samples of a step, the first of them, and those of the rank."""
    samples, first, mine = 0, None, []
    for samples, sample in zip(count(1), step, strict=False):
        if samples == 1:
            first = sample
        if (samples - 1) % world_size == rank:
            mine.append(sample)
    return samples, first, mine
