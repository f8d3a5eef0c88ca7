"""Each sample once an epoch in the committed history, whatever happens to the ranks. Ranks are simulated in turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.common.examples import examples

pytest.importorskip("torch")
from torch.utils.data import DataLoader

from elasticjob.data.epoch_position import EpochPosition
from elasticjob.data.iterable import ElasticIterable
from elasticjob.data.micro_batches import microbatches
from elasticjob.data.sampler import ElasticSampler

pytestmark = pytest.mark.torch
EPOCHS = 2


class Rank(Protocol):
    """One rank of a round: its position, and its remaining steps of the epoch."""

    source: EpochPosition

    def steps(self) -> Iterator[Any]: ...


class MapRank:
    def __init__(self, length: int, global_batch: int, max_size: int | None, rank: int, world_size: int) -> None:
        self.source = ElasticSampler(length, seed=5, rank=rank, world_size=world_size)
        self._batches = microbatches(global_batch, self.source, max_size=max_size)
        self._loader = DataLoader(range(length), batch_sampler=self._batches, collate_fn=list)

    def steps(self) -> Iterator[Any]:
        assert len(self._loader) == sum(1 for _ in self._loader)
        return self._batches.steps(self._loader)


class IterableRank:
    def __init__(self, length: int, global_batch: int, max_size: int | None, rank: int, world_size: int) -> None:
        self.source = ElasticIterable(range(length), rank=rank, world_size=world_size)
        self._batches = microbatches(global_batch, self.source, max_size=max_size, collate_fn=list)
        self._loader = DataLoader(self._batches, batch_size=None)

    def steps(self) -> Iterator[Any]:
        return self._batches.steps(self._loader)


def take(step: Any) -> list[int]:
    """Return the samples of one rank's step that count, and check that the rank has data for each forward pass."""
    taken: list[int] = []
    for batch in step:
        assert len(batch.data) == max(batch.samples, 1)
        assert (batch.weight > 0) == (batch.samples > 0)
        taken += batch.data[: batch.samples]
    return taken


class Job:
    """Rounds of a job whose committed history is checked at the end."""

    def __init__(self, make: Any, length: int, global_batch: int, max_size: int | None) -> None:
        self._make, self._length, self._shape = make, length, (length, global_batch, max_size)
        self._global_batch = global_batch
        self.committed: list[tuple[int, int]] = []
        """(epoch, sample) of the steps before the last commit."""
        self.saved: dict[str, int] | None = None

    def round(self, world_size: int, limit: int, commit_every: int, crashes: bool) -> None:
        """Train for at most `limit` steps. A round that crashes loses the steps after its last commit."""
        ranks: list[Rank] = [self._make(*self._shape, rank, world_size) for rank in range(world_size)]
        for rank in ranks:
            if self.saved is not None:
                rank.source.load_state_dict(self.saved)
        since_commit: list[tuple[int, int]] = []
        for number, (epoch, samples) in enumerate(self._steps(ranks), 1):
            since_commit += [(epoch, sample) for sample in samples]
            if number % commit_every == 0 or (number == limit and not crashes):
                self.saved = dict(ranks[0].source.state_dict())
                self.committed += since_commit
                since_commit = []
            if number == limit:
                return
        if not crashes:
            self.saved = dict(ranks[0].source.state_dict())
            self.committed += since_commit

    def _steps(self, ranks: list[Rank]) -> Iterator[tuple[int, list[int]]]:
        while (epoch := ranks[0].source.epoch) < EPOCHS:
            for steps in zip(*(rank.steps() for rank in ranks), strict=True):  # all ranks have the same steps
                samples = [sample for step in steps for sample in take(step)]
                assert len(samples) == steps[0].samples <= self._global_batch
                assert len({tuple(rank.source.state_dict().items()) for rank in ranks}) == 1
                yield epoch, samples
            assert ranks[0].source.epoch == epoch + 1

    def check(self) -> None:
        assert Counter(self.committed) == Counter((e, s) for e in range(EPOCHS) for s in range(self._length))


ROUNDS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.booleans()), max_size=12)


@pytest.mark.parametrize("make", [MapRank, IterableRank])
@examples(80)
@given(st.integers(1, 60), st.integers(1, 16), st.none() | st.integers(1, 5), ROUNDS)
def test_each_sample_once_an_epoch_in_any_sequence_of_rounds(
    make: Any, length: int, global_batch: int, max_size: int | None, rounds: list[tuple[int, int, int, bool]]
) -> None:
    job = Job(make, length, global_batch, max_size)
    for world_size, limit, commit_every, crashes in rounds:
        job.round(world_size, limit, commit_every, crashes)
    job.round(2, 10**6, 1, crashes=False)
    job.check()


@pytest.mark.parametrize("make", [MapRank, IterableRank])
def test_each_sample_once_an_epoch_over_sixty_faults(make: Any) -> None:
    dice = random.Random(1)
    job = Job(make, 997, 12, 3)
    for _ in range(60):
        job.round(dice.randint(1, 5), dice.randint(1, 5), dice.randint(1, 3), crashes=dice.random() < 0.6)
    assert job.saved is not None
    assert 0 < len(job.committed) < 2 * 997
    job.round(3, 10**6, 1, crashes=False)
    job.check()
