"""Which ranks a monitor process watches, and when it counts one as lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob.inprocess._monitors.heartbeats import LossDetector, RunningClock, watched_ranks


@pytest.mark.parametrize(
    ("own", "world_size", "left", "expected"),
    [
        (0, 1, set(), set()),
        (0, 2, set(), {1}),
        (0, 8, set(), {1, 2, 4}),
        (6, 8, set(), {7, 0, 2}),
        (0, 8, {1}, {2, 3, 4, 5}),  # what rank 1 watched
        (0, 4, {1, 2, 3}, set()),
    ],
)
def test_watched_ranks(own: int, world_size: int, left: set[int], expected: set[int]) -> None:
    assert watched_ranks(own, world_size, left) == expected


@given(st.integers(1, 200), st.data())
def test_each_rank_of_a_lost_node_is_watched_from_another_node(world_size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, world_size - 1))
    size = data.draw(st.integers(1, max(1, world_size // 2)))
    node = {(first + number) % world_size for number in range(size)}
    others = set(range(world_size)) - node
    watched = set().union(*(watched_ranks(own, world_size, set()) for own in others))
    assert not others or node <= watched


@given(st.integers(2, 60), st.data())
def test_all_ranks_of_a_lost_node_are_found_in_the_end(world_size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, world_size - 1))
    node = {(first + number) % world_size for number in range(data.draw(st.integers(1, world_size - 1)))}
    others = set(range(world_size)) - node
    found: set[int] = set()
    for _ in range(world_size.bit_length()):  # one time-out each
        found |= node & set().union(*(watched_ranks(own, world_size, found) for own in others))
    assert found == node


@given(st.integers(2, 60), st.data())
def test_as_long_as_two_ranks_are_left_each_is_watched(world_size: int, data: st.DataObject) -> None:
    left = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 2))
    alive = set(range(world_size)) - left
    for rank in alive:
        assert any(rank in watched_ranks(own, world_size, left) for own in alive - {rank})
        assert rank not in watched_ranks(rank, world_size, left)


def test_a_rank_is_lost_once_its_count_has_not_changed_for_the_time_out() -> None:
    detector = LossDetector(timeout=30)
    assert not detector.observe(1, 0, now=100)
    assert not detector.observe(1, 0, now=130)
    assert not detector.observe(1, 1, now=131)
    assert not detector.observe(2, 1, now=161.5)
    assert detector.observe(1, 1, now=161.5)


def test_a_pause_of_the_machine_is_no_time() -> None:
    clock = RunningClock(1000.0, longest_step=2.0)
    assert [clock.advance(now) for now in (1001.0, 1002.5, 9000.0, 9000.5)] == [1.0, 2.5, 4.5, 5.0]
