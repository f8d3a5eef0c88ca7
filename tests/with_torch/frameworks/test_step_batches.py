"""Steps with the same number of micro-batches, for frameworks that count them."""

from __future__ import annotations

from itertools import chain

import pytest

pytest.importorskip("torch")

from elasticjob.data.sampler import ElasticSampler
from elasticjob.frameworks.step_batches import StepBatches

pytestmark = pytest.mark.torch


def make(rank: int = 0, world_size: int = 1, *, samples: int = 26, global_batch: int = 8) -> StepBatches:
    sampler = ElasticSampler(samples, shuffle=False, rank=rank, world_size=world_size)
    return StepBatches(sampler, global_batch, max_size=3)


def test_all_steps_have_the_same_number_of_micro_batches() -> None:
    """The last step has two samples. Batches without samples hold a sample of the step, and come first."""
    batches = make()
    assert (batches.micro_batches, batches.steps_per_epoch, len(batches)) == (3, 4, 12)
    found = list(batches)
    assert found[:3] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert found[9:] == [[24], [24], [24, 25]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 9])
def test_each_sample_of_a_step_has_the_same_weight(world_size: int) -> None:
    ranks = [make(rank, world_size) for rank in range(world_size)]
    for start in (0, 8, 16, 24):
        count = ranks[0].micro_batches
        shares: dict[int, float] = {}
        for rank in ranks:
            weights = rank.weights()
            assert len(weights) == count
            for indices, weight in zip(list(rank)[:count], weights, strict=True):
                for index in indices if weight else []:
                    shares[index] = shares.get(index, 0) + weight / len(indices) / world_size
            rank.advance()
        size = min(8, 26 - start)
        assert shares == pytest.approx(dict.fromkeys(range(start, start + size), 1 / size))


def test_an_iteration_continues_at_the_position_at_another_world_size() -> None:
    first = make(1, 2)
    first.advance()
    first.advance()
    assert (first.epoch, first.steps_in_epoch) == (0, 2)
    second = make(0, 1)
    second.load_state_dict(first.state_dict())
    assert list(chain(*list(second)[:3])) == list(range(16, 24))
    assert len(second) == 12, "of a whole epoch"
    for _ in range(2):
        second.advance()
    assert (second.epoch, second.steps_in_epoch) == (1, 0)


def test_a_complete_training_has_no_batches() -> None:
    batches = make()
    batches.finished = True
    assert list(batches) == []


def test_another_global_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="is of steps of 8 samples, and global_batch is 6"):
        make(global_batch=6).load_state_dict(make().state_dict())
    with pytest.raises(ValueError, match="want 1 or more"):
        make(global_batch=0)


def test_the_loader_draws_nothing_from_the_random_generator_of_the_rank() -> None:
    import torch

    before = torch.get_rng_state()
    assert len(list(make().loader(list(range(26))))) == 12
    assert torch.equal(torch.get_rng_state(), before)


def test_a_limit_ends_each_epoch_early_also_after_an_interruption() -> None:
    whole, found = make(), []
    whole.limit_steps(3, "a limit")
    assert (whole.steps_per_epoch, len(whole)) == (3, 9)
    for _ in range(7):
        resumed = make()
        resumed.limit_steps(2, "a limit")  # as another world size would have it: the first one counts
        resumed.load_state_dict(whole.state_dict())
        assert list(resumed) == list(whole)
        found.append((whole.epoch, whole.steps_in_epoch))
        whole.advance()
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_a_position_of_epochs_with_another_limit_is_refused() -> None:
    limited = make()
    limited.limit_steps(3, "limit_train_batches=9")
    with pytest.raises(ValueError, match="is of epochs with limit_train_batches=9, and these have all steps"):
        make().load_state_dict(limited.state_dict())
    with pytest.raises(ValueError, match="is of epochs with all steps, and these have limit_train_batches=9"):
        limited.load_state_dict(make().state_dict())
