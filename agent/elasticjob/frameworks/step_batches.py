"""Micro-batches for frameworks that have their own training loop. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from elasticjob.data.sampler import ElasticSampler
from elasticjob.data.step_plan import PlannedBatch, micro_batch_count, plan_step, rank_positions, step_sizes


class StepBatches(Sampler):  # type: ignore[misc]  # torch has no types here
    """The `batch_sampler` of a data loader: the micro-batches of this rank, the same number in each step.

    Frameworks accumulate gradients over a fixed number of micro-batches. If the last step of an epoch needs fewer,
    batches of weight 0 fill it up. An iteration begins at the position that all ranks have reached; `len` counts the
    micro-batches of a whole epoch. The position moves with `advance`, not when a data loader reads ahead.
    """

    def __init__(self, sampler: ElasticSampler, global_batch: int, max_size: int) -> None:
        """`global_batch`: samples of a step on all ranks. `max_size`: samples of a micro-batch on a rank, at most.

        ValueError for sizes below 1.
        """
        if global_batch < 1 or max_size < 1:
            raise ValueError(f"global_batch is {global_batch} and the micro-batch {max_size}: want 1 or more")
        self.finished = False
        """Whether the training is complete: iterations are empty."""
        self._limit: tuple[int, str] = (0, "")
        self.elastic_sampler = sampler
        self._global_batch = global_batch
        self._max_size = max_size
        self._generator = torch.Generator()

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each step in the current round, the same on all ranks."""
        return micro_batch_count(self._global_batch, self.elastic_sampler.ranks.current()[1], self._max_size)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, the same at any world size."""
        return self._limit[0] or self.all_steps

    @property
    def all_steps(self) -> int:
        """Number of steps of an epoch without a limit."""
        return -(-self.elastic_sampler.length // self._global_batch)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.elastic_sampler.epoch

    @property
    def steps_in_epoch(self) -> int:
        """Number of completed steps of the current epoch."""
        return self.elastic_sampler.consumed // self._global_batch

    def limit_steps(self, steps: int, option: str) -> None:
        """Let each epoch end after so many steps, and leave out the rest of its samples.

        `option`: what the user has written for that. A limit of the same option stays, also that of a saved position:
        it is the one with which the training began.
        """
        if option != self._limit[1]:
            self._limit = (min(steps, self.all_steps), option)

    def weights(self) -> list[float]:
        """Return the weight of each micro-batch of the next step: factors for mean losses, as in `MicroBatch`."""
        samples = min(self._global_batch, self.elastic_sampler.length - self.elastic_sampler.consumed)
        return [planned.weight for planned in self._plan(samples, *self.elastic_sampler.ranks.current())]

    def advance(self) -> None:
        """Move the position by one step."""
        self.elastic_sampler.advance(self._global_batch)
        if self.steps_in_epoch >= self.steps_per_epoch:
            self.elastic_sampler.set_epoch(self.elastic_sampler.epoch + 1)

    def loader(self, dataset: Any, **options: Any) -> Any:
        """Return a data loader with these options of `DataLoader`.

        It has a random generator of its own, so that a resumed epoch draws nothing from the rank's.
        """
        return _ResumableLoader(dataset, batch_sampler=self, generator=self._generator, **options)

    def __iter__(self) -> Iterator[list[int]]:
        if self.finished:
            return iter(())
        sampler = self.elastic_sampler
        self._generator.manual_seed(sampler.epoch)  # the loader draws the seeds of its workers after this call
        sizes = step_sizes(sampler.length - sampler.consumed, self._global_batch)
        left = islice(sizes, self.steps_per_epoch - self.steps_in_epoch)
        return self._batches(sampler.consumed, left, sampler.order(), *sampler.ranks.current())

    def __len__(self) -> int:
        return self.steps_per_epoch * self.micro_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the global batch and the limit that it refers to: the same on every rank."""
        return {**self.elastic_sampler.state_dict(), "global_batch": self._global_batch, "limit": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. ValueError if it is of another dataset, order, global batch or limit."""
        if state["global_batch"] != self._global_batch:
            raise ValueError(
                f"the saved position is of steps of {state['global_batch']} samples, and global_batch is "
                f"{self._global_batch}: use the same value, or train without the saved state"
            )
        limit, option = state.get("limit", (0, ""))
        if option != self._limit[1]:
            raise ValueError(
                f"the saved position is of epochs with {option or 'all steps'}, and these have "
                f"{self._limit[1] or 'all steps'}: use the same option, or train without the saved state"
            )
        self.elastic_sampler.load_state_dict(state)
        self._limit = (limit, option)

    def _batches(self, start: int, sizes: Iterator[int], order: Any, rank: int, world_size: int) -> Iterator[list[int]]:
        for samples in sizes:
            positions = rank_positions(start, start + samples, rank, world_size)
            for planned in self._plan(samples, rank, world_size):
                # An empty batch has no mean loss. One sample of the step takes its place, with weight 0.
                yield order.indices(positions[planned.start : planned.stop] or range(start, start + 1))
            start += samples

    def _plan(self, samples: int, rank: int, world_size: int) -> list[PlannedBatch]:
        plan = plan_step(samples, rank, world_size, self._max_size)
        missing = micro_batch_count(self._global_batch, world_size, self._max_size) - len(plan)
        return [PlannedBatch(0, 0, 0.0, last=False)] * missing + list(plan)


class _ResumableLoader(DataLoader):  # type: ignore[misc]  # torch has no types here
    """A data loader that frameworks recognize as resumable; the position is the sampler's."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
