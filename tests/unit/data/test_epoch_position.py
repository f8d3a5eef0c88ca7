"""The position of all ranks in an epoch."""

from __future__ import annotations

import pytest

from elasticjob.data.epoch_position import EpochPosition


def position(of: EpochPosition) -> tuple[int, int]:
    return of.epoch, of.consumed


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([], (0, 0)), ([4], (0, 4)), ([4, 4], (0, 8)), ([4, 4, 2], (1, 0)), ([4, 4, 4], (1, 0)), ([12, 3], (1, 3))],
)
def test_a_step_never_continues_in_the_next_epoch(steps: list[int], expected: tuple[int, int]) -> None:
    of = EpochPosition(length=10)
    for samples in steps:
        of.advance(samples)
    assert position(of) == expected


def test_an_epoch_of_unknown_length_does_not_end_by_itself() -> None:
    of = EpochPosition()
    of.advance(10**9)
    assert position(of) == (0, 10**9)


def test_only_another_epoch_begins_at_its_beginning() -> None:
    of = EpochPosition(length=10)
    of.advance(4)
    of.set_epoch(0)
    assert position(of) == (0, 4)
    of.set_epoch(3)
    assert position(of) == (3, 0)


def test_negative_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="samples is -1: want the number of samples of the step on all ranks"):
        EpochPosition().advance(-1)


def test_a_position_is_restored_in_the_same_order_only() -> None:
    of = EpochPosition(length=10, shuffle=1, seed=7)
    of.set_epoch(2)
    of.advance(3)
    saved = of.state_dict()
    assert saved == {"epoch": 2, "consumed": 3, "length": 10, "shuffle": 1, "seed": 7}
    restored = EpochPosition(length=10, shuffle=1, seed=7)
    restored.load_state_dict(saved)
    assert position(restored) == (2, 3)
    other = EpochPosition(length=12, shuffle=1, seed=7)
    with pytest.raises(ValueError, match=r"is of a dataset with length=10, .* this one has length=12, "):
        other.load_state_dict(saved)
    assert position(other) == (0, 0)
