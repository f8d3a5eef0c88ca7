"""The order of samples, what a saved position keeps, and how wrong uses are reported."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, cast

import pytest

pytest.importorskip("torch")
from torch.utils.data import DataLoader, get_worker_info

from elasticjob.data.iterable import ElasticIterable
from elasticjob.data.micro_batches import microbatches
from elasticjob.data.sampler import ElasticSampler

pytestmark = pytest.mark.torch


def deal(world_size: int, **arguments: Any) -> list[list[int]]:
    samplers = [ElasticSampler(10, rank=rank, world_size=world_size, **arguments) for rank in range(world_size)]
    dealt = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(indices) for indices in dealt]
    return dealt


def test_a_sampler_alone_deals_the_epoch_exactly() -> None:
    assert deal(3, shuffle=False) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert sorted(index for indices in deal(3) for index in indices) == list(range(10))


def test_the_order_depends_on_seed_and_epoch_but_not_on_the_ranks() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ElasticSampler(100, seed=seed, rank=0, world_size=1)
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(found) for found in orders}) == 9
    assert order(1, 2) == order(1, 2)
    (alone,), (one, other) = deal(1), deal(2)
    assert (alone[0::2], alone[1::2]) == (one, other)


def test_ranks_are_read_when_iteration_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ElasticSampler(range(4), shuffle=False)
    assert list(sampler) == [0, 1, 2, 3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler.advance(1)
    assert list(sampler) == [2]
    assert list(ElasticIterable(range(4))) == [1, 3]


def test_a_copy_for_a_spawned_worker_keeps_the_ranks_of_the_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    copy = pickle.dumps(ElasticIterable(range(4)))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(pickle.loads(copy)) == [1, 3]  # noqa: S301


@pytest.mark.parametrize(
    ("rank", "world_size", "error"),
    [(1, None, "give both"), (None, 2, "give both"), (2, 2, "rank is 2 and world_size is 2"), (-1, 2, "rank is -1")],
)
def test_incomplete_or_impossible_ranks_are_refused(rank: int | None, world_size: int | None, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ElasticSampler(4, rank=rank, world_size=world_size)


def test_empty_datasets_iterators_and_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="the dataset has 0 samples"):
        ElasticSampler([])
    with pytest.raises(TypeError, match="the dataset is an iterator"):
        ElasticIterable(iter([1]))
    for sizes in ((0, None), (4, 0)):
        with pytest.raises(ValueError, match="want 1 or more"):
            microbatches(sizes[0], ElasticSampler(4), max_size=sizes[1])


class Shuffled:
    """A dataset that can only be iterated, in an order of its own for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch * 7 + i) % 11 for i in range(11)])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_data_loader_workers_do_not_change_the_steps(workers: int) -> None:
    def decode(sample: int) -> tuple[int, int]:
        info = get_worker_info()
        return sample, -1 if info is None else info.id

    source = ElasticIterable(Shuffled(), transform=decode, rank=1, world_size=2)
    batches = microbatches(4, source, max_size=1, collate_fn=list)
    loader = DataLoader(batches, batch_size=None, num_workers=workers)
    source.set_epoch(1)
    seen, ids = [], set()
    for step in batches.steps(loader):
        taken = [(batch.data[0], batch.samples) for batch in step]
        seen.append([sample for (sample, _), samples in taken if samples])
        ids |= {worker for (_, worker), _ in taken}
    assert seen == [[8, 10], [1, 3], [5]]
    assert ids == (set(range(workers)) or {-1})
    assert source.state_dict() == {"epoch": 2, "consumed": 0}


def test_reading_ahead_does_not_move_the_position() -> None:
    sampler = ElasticSampler(64, shuffle=False, rank=0, world_size=1)
    batches = microbatches(8, sampler)
    loader = DataLoader(range(64), batch_sampler=batches, num_workers=1, prefetch_factor=4, collate_fn=list)
    steps = batches.steps(loader)
    step = next(steps)
    assert sampler.consumed == 0
    assert [batch.data for batch in step] == [list(range(8))]
    assert sampler.consumed == 8


def test_persistent_workers_follow_the_position() -> None:
    sampler = ElasticSampler(6, shuffle=False, rank=0, world_size=1)
    batches = microbatches(4, sampler)
    loader = DataLoader(range(6), batch_sampler=batches, num_workers=1, persistent_workers=True, collate_fn=list)
    sampler.advance(3)
    assert [[batch.data for batch in step] for step in batches.steps(loader)] == [[[3, 4, 5]]]
    assert [[batch.data for batch in step] for step in batches.steps(loader)] == [[[0, 1, 2, 3]], [[4, 5]]]
    assert sampler.epoch == 2


def loop() -> tuple[ElasticSampler, Iterator[Any]]:
    sampler = ElasticSampler(8, rank=0, world_size=1)
    batches = microbatches(4, sampler, max_size=2)
    return sampler, batches.steps(DataLoader(range(8), batch_sampler=batches))


def test_a_step_whose_micro_batches_were_not_all_taken_is_reported() -> None:
    sampler, steps = loop()
    next(iter(next(steps)))
    with pytest.raises(RuntimeError, match="the step has micro-batches left"):
        next(steps)
    assert sampler.consumed == 0


def test_a_position_that_other_code_moves_is_reported() -> None:
    sampler, steps = loop()
    assert [batch.last for batch in next(steps)] == [False, True]
    sampler.advance(4)
    with pytest.raises(RuntimeError, match="only the loop moves it"):
        next(steps)
    sampler, steps = loop()
    step = next(steps)
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="only the loop moves it"):
        list(step)


def test_loaders_that_would_repeat_or_lose_samples_are_refused() -> None:
    sampler, source = ElasticSampler(8), ElasticIterable(range(8))
    batches, stream = microbatches(4, sampler), microbatches(4, source)
    for steps, loader, advice in [
        (batches.steps, DataLoader(range(8), sampler=sampler), "batch_sampler=microbatches"),
        (stream.steps, DataLoader(source), "as its dataset"),
        (stream.steps, DataLoader(stream, batch_size=2), "batch_size=None"),
        (stream.steps, DataLoader(stream, batch_size=None, collate_fn=list), "pass collate_fn to microbatches"),
        (stream.steps, DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True), "persistent"),
    ]:
        with pytest.raises(ValueError, match=advice):
            next(steps(loader))
    loader = DataLoader(range(8), batch_sampler=batches)
    loader.in_order = False
    with pytest.raises(ValueError, match="in_order=True"):
        next(batches.steps(loader))
    with pytest.raises(ValueError, match="to the data loader"):
        microbatches(4, sampler, collate_fn=list)


def test_a_loader_or_dataset_that_ends_too_early_is_reported() -> None:
    sampler, source = ElasticSampler(8), ElasticIterable(range(8))
    batches = microbatches(4, sampler)

    class Short:
        batch_sampler = batches

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(RuntimeError, match="the data loader ended before the epoch"):
        list(next(batches.steps(Short())))
    source.advance(9)
    with pytest.raises(RuntimeError, match="ended after 8 samples, of which 9 were consumed"):
        list(source)


def test_a_stateful_data_loader_needs_no_state_of_its_own() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    sampler = ElasticSampler(10, shuffle=False, rank=0, world_size=2)
    source = ElasticIterable(range(10), rank=0, world_size=2)
    batches, stream = microbatches(4, sampler), microbatches(4, source, collate_fn=list)
    kept: Any
    found: Any
    for workers in (0, 1):
        for kept, found, loader in [
            (sampler, batches,
             loaders.StatefulDataLoader(range(10), batch_sampler=batches, collate_fn=list, num_workers=workers)),
            (source, stream, loaders.StatefulDataLoader(stream, batch_size=None, num_workers=workers)),
        ]:  # fmt: skip
            steps = found.steps(loader)
            assert [batch.data for batch in next(steps)] == [[0, 2]]
            saved = kept.state_dict()
            assert [batch.data for batch in next(steps)] == [[4, 6]]  # after the last commit: done again
            del steps
            kept.load_state_dict(saved)
            rest = [[batch.data for batch in step] for step in found.steps(loader)]
            assert rest == [[[4, 6]], [[8]]]
            kept.epoch = kept.consumed = 0


class Weighted:
    """An order of the user's own, with repetitions."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, epoch: int) -> list[int]:
        return [(epoch + 2 * i) % 4 for i in range(self.length)]


def test_an_order_of_the_users_own_decides_which_sample_comes_when() -> None:
    sampler = ElasticSampler(6, order=Weighted(6), rank=1, world_size=2)
    assert list(sampler) == [2, 2, 2]
    sampler.advance(6)
    assert list(sampler) == [3, 3, 3]
    with pytest.raises(ValueError, match=r"order\(0\) returned 5 indices: want 6"):
        list(ElasticSampler(6, order=Weighted(5)))


def test_a_position_in_an_order_of_the_users_own_is_no_position_in_another_one() -> None:
    own, usual = ElasticSampler(6, order=Weighted(6)), ElasticSampler(6)
    own.load_state_dict(own.state_dict())
    for one, other in ((own, usual), (usual, own)):
        with pytest.raises(ValueError, match="own_order=1"):
            one.load_state_dict(other.state_dict())


def test_the_ranks_of_a_replica_get_the_same_samples() -> None:
    """Four ranks in two replicas; the function is called again in each iteration."""
    replica = (0, 2)
    sampler = ElasticSampler(5, shuffle=False, data_parallel=lambda: replica)
    stream = ElasticIterable(range(5), data_parallel=lambda: replica)
    batches = microbatches(2, sampler)
    assert (list(sampler), list(stream), list(batches)) == ([0, 2, 4], [0, 2, 4], [[0], [2], [4]])
    replica = (1, 2)
    assert (list(sampler), list(stream), list(batches)) == ([1, 3], [1, 3], [[1], [3], [4]])
    copy = pickle.dumps(sampler.ranks)
    assert pickle.loads(copy).current() == (1, 2), "in a spawned worker"  # noqa: S301


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"data_parallel": 3}, "data_parallel is of type int: pass a process group, a device mesh of one dimension"),
        ({"data_parallel": lambda: "dp"}, "data_parallel is of type str"),
        ({"data_parallel": lambda: (2, 2)}, "want a rank from 0 to world_size - 1"),
        ({"data_parallel": (0, 2), "rank": 0, "world_size": 2}, "give either rank and world_size, or data_parallel"),
    ],
)
def test_what_has_no_number_of_a_replica_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        list(ElasticSampler(4, **arguments))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_resumed_epoch_draws_the_random_numbers_of_an_undisturbed_one(
    workers: int, stream: bool, persistent: bool
) -> None:
    """After each step of two epochs, a new loader goes on with the position and the generator of that step."""
    import torch

    if persistent and (stream or not workers):
        pytest.skip("no such loaders")

    def make() -> tuple[Any, Any, Any]:
        ranks: Any = {"rank": 0, "world_size": 1}
        source: Any = ElasticIterable(range(8), **ranks) if stream else ElasticSampler(8, **ranks)
        batches: Any = microbatches(4, source)
        loader = (
            DataLoader(batches, batch_size=None, num_workers=workers)
            if stream
            else DataLoader(range(8), batch_sampler=batches, num_workers=workers, persistent_workers=persistent)
        )
        return source, batches, loader

    def train(resume: Any = None, limit: int = 100) -> list[tuple[float, Any]]:
        source, batches, loader = make()
        if resume is not None:
            source.load_state_dict(resume[0])
            torch.set_rng_state(resume[1])
        found: list[tuple[float, Any]] = []
        while source.epoch < 2:
            for step in batches.steps(loader):
                list(step)
                found.append((torch.rand(()).item(), (source.state_dict(), torch.get_rng_state())))
                if len(found) == limit:
                    return found
        return found

    torch.manual_seed(5)
    whole = train()
    numbers = [number for number, _ in whole]
    assert len(set(numbers)) == 4
    for done in range(1, 4):
        assert [number for number, _ in train(whole[done - 1][1])] == numbers[done:]


def test_workers_of_each_epoch_have_other_random_numbers() -> None:
    import torch

    class Random:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(torch.rand(()))

    def epochs(seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        sampler = ElasticSampler(4, rank=0, world_size=1)
        batches: Any = microbatches(4, sampler)
        loader = DataLoader(cast(Any, Random()), batch_sampler=batches, num_workers=1)
        return [[value for step in batches.steps(loader) for batch in step for value in batch.data] for _ in "12"]

    first, second = epochs(1)
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first
