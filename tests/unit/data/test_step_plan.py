"""Steps, shares and micro-batches: complete, at every world size, and weighted as the mean over the step."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob.data.step_plan import micro_batch_count, plan_step, rank_positions, step_sizes

SAMPLES = st.integers(1, 200)
WORLD_SIZES = st.integers(1, 12)
MAX_SIZES = st.none() | st.integers(1, 40)


@given(SAMPLES, WORLD_SIZES, MAX_SIZES)
def test_every_sample_of_a_step_contributes_the_same_to_the_averaged_gradient(
    samples: int, world_size: int, max_size: int | None
) -> None:
    contributions: dict[int, Fraction] = {}
    for rank in range(world_size):
        positions = rank_positions(0, samples, rank, world_size)
        for batch in plan_step(samples, rank, world_size, max_size):
            for position in positions[batch.start : batch.stop]:
                assert position not in contributions
                # Mean over the micro-batch, then mean over the ranks.
                mean = Fraction(batch.weight).limit_denominator(10**6) / (batch.stop - batch.start)
                contributions[position] = mean / world_size
    assert contributions == dict.fromkeys(range(samples), Fraction(1, samples))


@given(SAMPLES, WORLD_SIZES, MAX_SIZES)
def test_all_ranks_have_the_same_number_of_micro_batches_within_the_maximum(
    samples: int, world_size: int, max_size: int | None
) -> None:
    plans = [plan_step(samples, rank, world_size, max_size) for rank in range(world_size)]
    assert {len(plan) for plan in plans} == {micro_batch_count(samples, world_size, max_size)}
    sizes = [[batch.stop - batch.start for batch in plan] for plan in plans]
    largest = max(size for of_rank in sizes for size in of_rank)
    assert largest <= (max_size or samples)
    assert len(plans[0]) == 1 or largest * (len(plans[0]) - 1) < sum(sizes[0])  # one fewer would not be enough
    for plan, of_rank in zip(plans, sizes, strict=True):
        assert [batch.last for batch in plan] == [False] * (len(plan) - 1) + [True]
        assert max(of_rank) - min(of_rank) <= 1
        assert (of_rank[-1] == 0) == (sum(of_rank) == 0)


@pytest.mark.parametrize(
    ("samples", "world_size", "max_size", "sizes"),
    [
        (8, 1, None, [[8]]),
        (8, 2, None, [[4], [4]]),
        (8, 3, None, [[3], [3], [2]]),
        (8, 1, 3, [[2, 3, 3]]),
        (8, 3, 2, [[1, 2], [1, 2], [1, 1]]),
        (4, 3, 1, [[1, 1], [0, 1], [0, 1]]),
        (2, 3, 4, [[1], [1], [0]]),
    ],
)
def test_plans(samples: int, world_size: int, max_size: int | None, sizes: list[list[int]]) -> None:
    plans = [plan_step(samples, rank, world_size, max_size) for rank in range(world_size)]
    assert [[batch.stop - batch.start for batch in plan] for plan in plans] == sizes


@pytest.mark.parametrize(("remaining", "sizes"), [(0, []), (1, [1]), (4, [4]), (9, [4, 4, 1])])
def test_only_the_last_step_is_smaller(remaining: int, sizes: list[int]) -> None:
    assert list(step_sizes(remaining, 4)) == sizes
