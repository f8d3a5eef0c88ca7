"""`elasticjob.ElasticSampler`: each sample of a map-style dataset once an epoch, at any world size. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from elasticjob.data.epoch_position import EpochPosition
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
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`seed`: with the epoch, it decides the order; the same on every rank. ValueError for an empty dataset.

        Without `rank` and `world_size`, each iteration reads them when it begins: from torch.distributed if it is
        initialized, else from RANK and WORLD_SIZE.
        """
        self.length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        """Number of samples of an epoch."""
        if self.length < 1:
            raise ValueError(f"the dataset has {self.length} samples: want 1 or more")
        super().__init__(self.length, shuffle=int(shuffle), seed=seed)
        self.ranks = Ranks(rank, world_size)
        self._shuffle = shuffle
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().indices(rank_positions(self.consumed, self.length, *self.ranks.current())))

    def __len__(self) -> int:
        """Return the number of this rank's samples in the rest of the epoch."""
        return len(rank_positions(self.consumed, self.length, *self.ranks.current()))

    def order(self) -> EpochOrder:
        """Return the order of the current epoch. It needs 8 bytes a sample if shuffled."""
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
