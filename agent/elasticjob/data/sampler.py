"""`elasticjob.ElasticSampler`: each sample of a map-style dataset once an epoch, at any world size. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from elasticjob.data.epoch_position import OWN_ORDER, EpochPosition
from elasticjob.data.ranks import Ranks
from elasticjob.data.step_plan import rank_positions


class ElasticSampler(EpochPosition, Sampler):  # type: ignore[misc]  # torch has no types here
    """Deals each epoch's samples to the ranks of the current round, from the position that all ranks have reached.

    Keep it in an `elasticjob.State`: `State(sampler=sampler, ...)`. The position is the same on every rank. It moves
    when the training loop has done a step, not when a data loader reads ahead. After a round, the rest of the epoch is
    dealt to the ranks of the next round: no sample is repeated or lost, except that steps after the last commit are
    done again.

    For training, use it with `elasticjob.microbatches`, which moves the position and gives every rank the same number
    of steps. The sampler alone, `DataLoader(dataset, sampler=sampler)`, yields the indices of this rank in the rest of
    the epoch: exactly, so some ranks can have one sample, and so one batch, more than others. That is right for loops
    without collectives, such as an evaluation. To train in such a loop, call `sampler.advance(batch_size * world_size)`
    after each step, and run it in `torch.distributed.algorithms.Join`, which handles the last, uneven step.

    Example:
        >>> sampler = elasticjob.ElasticSampler(6, shuffle=False, rank=1, world_size=2)
        >>> list(sampler)
        [1, 3, 5]
        >>> sampler.advance(2)  # both ranks have done a step of one sample
        >>> list(sampler)
        [3, 5]
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: Any = None,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Begin with the first sample of epoch 0.

        Args:
            dataset_or_length: A map-style dataset, or its number of samples.
            shuffle: Shuffle the samples in each epoch.
            seed: With the epoch, it decides the order; the same on every rank.
            rank: This rank. None: each iteration reads it when it begins, from torch.distributed if it is initialized,
                else from RANK.
            world_size: Number of ranks. None: read with the rank.
            data_parallel: What numbers the replicas of the model, if several ranks together hold one (tensor, pipeline
                or context parallelism): all ranks of a replica then get the same samples. A process group, a device
                mesh of one dimension, or a function that returns one of these or (rank, size). A function is called
                when an iteration begins, so a sampler that outlives a round needs one:
                `data_parallel=lambda: mesh["dp"]`.
            order: An order of your own instead of `shuffle`: a function that takes the epoch and returns the indices of
                its samples, as many as the dataset has, which may repeat. All ranks must return the same ones.

        Raises:
            ValueError: The dataset is empty.
        """
        self.length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        """Number of samples of an epoch."""
        if self.length < 1:
            raise ValueError(f"the dataset has {self.length} samples: want 1 or more")
        super().__init__(self.length, shuffle=int(shuffle), seed=seed, **({} if order is None else {OWN_ORDER: 1}))
        self.ranks = Ranks(rank, world_size, data_parallel)
        self._own_order = order
        self._shuffle = shuffle
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().indices(rank_positions(self.consumed, self.length, *self.ranks.current())))

    def __len__(self) -> int:
        """Return the number of this rank's samples in the rest of the epoch."""
        return len(rank_positions(self.consumed, self.length, *self.ranks.current()))

    def order(self) -> EpochOrder:
        """Return the order of the current epoch. It needs 8 bytes a sample unless it is that of the dataset.

        ValueError if an order of the user has another number of samples.
        """
        if self._own_order is not None:
            indices = torch.as_tensor(self._own_order(self.epoch), dtype=torch.int64)
            if indices.shape != (self.length,):
                raise ValueError(f"order({self.epoch}) returned {len(indices)} indices: want {self.length}")
            return EpochOrder(indices)
        if not self._shuffle:
            return EpochOrder(None)
        generator = torch.Generator()
        # Mixed, not added: epoch 1 of seed 0 must differ from epoch 0 of seed 1.
        generator.manual_seed(random.Random(f"{self._seed} {self.epoch}").getrandbits(63))  # noqa: S311
        return EpochOrder(torch.randperm(self.length, generator=generator))


class EpochOrder:
    """The indices of an epoch's samples, by position."""

    def __init__(self, permutation: Any) -> None:
        """`permutation`: int64 tensor of shape (length,); None: each index is its position."""
        self._permutation = permutation

    def indices(self, positions: range) -> list[int]:
        """Return the dataset's indices of the samples at these positions."""
        if self._permutation is None:
            return list(positions)
        found: list[int] = self._permutation[positions.start : positions.stop : positions.step].tolist()
        return found
