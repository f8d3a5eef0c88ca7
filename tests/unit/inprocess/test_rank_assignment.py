"""Ranks in the next iteration, and which of them are active."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob.inprocess.composition import Compose, compose
from elasticjob.inprocess.exception import RestartError
from elasticjob.inprocess.rank_assignment import (
    ArrangedRanks,
    FillGaps,
    FilterGroupedByKey,
    Layer,
    RankPlace,
    ShiftRanks,
    StableRanks,
    Tree,
    WholeNodes,
)
from elasticjob.inprocess.rank_filter import (
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    RankFilter,
    WorldSizeDivisibleBy,
)
from elasticjob.inprocess.state import State, Status
from support.training.dict_store import DictStore

HOSTS = {"a": 2, "b": 2, "c": 2}


def members(hosts: list[str]) -> list[RankPlace]:
    return [RankPlace(rank, rank, host) for rank, host in enumerate(hosts)]


def state(rank: int, world_size: int) -> State:
    return State(rank, world_size, rank, world_size)


RACKS = Tree(
    Layer(key=lambda member: member.domain(1), min_ranks=3),
    Layer(key=lambda member: member.domain(2), min_ranks=1, max_ranks=2),
)


@pytest.mark.parametrize(
    ("rule", "hosts", "terminated", "order", "active"),
    [
        (ShiftRanks(), "abcd", set(), (0, 1, 2, 3), 4),
        (ShiftRanks(), "abcd", {1}, (0, 2, 3), 3),
        (ShiftRanks(), "abcd", {0, 3}, (1, 2), 2),
        (FillGaps(), "abcde", {1}, (0, 4, 2, 3), 4),
        (FillGaps(), "abcde", {0, 2}, (4, 1, 3), 3),
        (FillGaps(), "abcde", {3, 4}, (0, 1, 2), 3),
        (StableRanks(3), "abcde", set(), (0, 1, 2, 3, 4), 3),
        (StableRanks(3), "abcde", {1}, (0, 3, 2, 4), 3),  # the first spare, where FillGaps takes the last rank
        (StableRanks(3), "abcde", {0, 1}, (3, 4, 2), 3),
        (StableRanks(3), "abcde", {0, 3, 4}, (2, 1), 2),
        (StableRanks(4), "abcdef", {0, 1, 2}, (4, 5, 3), 3),
        (StableRanks(9), "abcd", {1}, (0, 3, 2), 3),
        (WholeNodes(2), "aabbcc", set(), (0, 1, 2, 3, 4, 5), 6),
        (WholeNodes(2), "aabbcc", {2}, (0, 1, 4, 5, 3), 4),
        (WholeNodes(2), "ababab", {1}, (0, 2, 3, 5, 4), 4),
        (Tree(Layer(key=lambda member: member.host)), "abab", set(), (0, 2, 1, 3), 4),
        (Tree(Layer(key=lambda member: member.host, max_ranks=1)), "aabb", set(), (0, 2, 1, 3), 2),
        (Tree(Layer(key=lambda member: member.host, max_ranks=1)), "aabb", {0}, (1, 2, 3), 2),  # its own spare
        (RACKS, ["x/a", "x/a", "x/b", "y/c", "y/c", "y/d"], {2}, (3, 4, 5, 0, 1), 3),
        (RACKS, ["x/a", "y/c", "x/a", "y/c", "x/b", "y/d"], set(), (0, 2, 4, 1, 3, 5), 6),
    ],
)
def test_the_next_ranks(
    rule: ArrangedRanks, hosts: list[str], terminated: set[int], order: tuple[int, ...], active: int
) -> None:
    found = rule.arrange(members(list(hosts)), terminated)
    assert (found.order, found.active) == (order, active)


@given(
    rule=st.sampled_from(
        [ShiftRanks(), FillGaps(), StableRanks(1), StableRanks(3), StableRanks(50), WholeNodes(2), RACKS]
    ),
    hosts=st.lists(st.sampled_from(["x/a", "x/b", "y/a", "y/c"]), min_size=1, max_size=12),
    data=st.data(),
)
def test_every_remaining_rank_gets_one_number(rule: ArrangedRanks, hosts: list[str], data: st.DataObject) -> None:
    terminated = data.draw(st.sets(st.integers(0, len(hosts) - 1)))
    found = rule.arrange(members(hosts), terminated)
    assert sorted(found.order) == sorted(set(range(len(hosts))) - terminated)
    assert 0 <= found.active <= len(found.order)


@given(st.integers(1, 40), st.data())
def test_ranks_move_only_into_gaps(world_size: int, data: st.DataObject) -> None:
    terminated = data.draw(st.sets(st.integers(0, world_size - 1)))
    order = FillGaps().arrange(members(["a"] * world_size), terminated).order
    assert all(new == old for new, old in enumerate(order) if new not in terminated)
    active = data.draw(st.integers(1, world_size))
    stable = StableRanks(active).arrange(members(["a"] * world_size), terminated)
    assert all(new == old for new, old in enumerate(stable.order[: stable.active]) if new not in terminated)


def test_each_rank_takes_its_own_place() -> None:
    placed, left = ShiftRanks()(state(3, 4), {1})
    assert (placed.rank, placed.world_size, placed.status, left) == (2, 3, Status.ACTIVE, set())
    assert (placed.initial_rank, placed.initial_world_size) == (3, 4)


def test_a_rank_without_a_place_is_terminated_and_terminated_ranks_in_an_arrangement_are_returned() -> None:
    class First(ShiftRanks):
        def arrange(self, members: object, terminated: object) -> object:  # type: ignore[override]
            return ShiftRanks().arrange([RankPlace(0, 0, ""), RankPlace(1, 1, "")], set())

    placed, left = First()(state(2, 3), {1})
    assert (placed.status, left) == (Status.TERMINATED, {1})


def test_hosts_are_read_from_the_store_for_remaining_ranks_only() -> None:
    store = DictStore()
    for rank, host in enumerate(["a", "b", "a", "b"]):
        if rank != 1:
            store.set_initial_rank(rank, rank, host)
    old = State(3, 4, 3, 4, store=store)
    assert WholeNodes(2)(old, {1})[0] == State(2, 3, 3, 4, None, 2, status=Status.INACTIVE)


@pytest.mark.parametrize(
    ("filters", "active"),
    [
        ([MaxActiveWorldSize()], 7),
        ([MaxActiveWorldSize(8)], 7),
        ([MaxActiveWorldSize(3)], 3),
        ([ActiveWorldSizeDivisibleBy(4)], 4),
        ([ActiveWorldSizeDivisibleBy(8)], 0),
        ([MaxActiveWorldSize(5), ActiveWorldSizeDivisibleBy(2)], 4),
        ([ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(5)], 5),
    ],
)
def test_filters_decide_which_ranks_are_active(filters: list[RankFilter], active: int) -> None:
    for rank in (0, 3, 4, 6):
        found = compose(*filters)(state(rank, 7).activate_all_ranks())
        assert found.is_active == (rank < active)
        assert (found.active_rank, found.active_world_size) == (rank if rank < active else None, active)


def test_filters_follow_a_rank_assignment_that_left_spares() -> None:
    composed = compose(StableRanks(3), ActiveWorldSizeDivisibleBy(2))
    assert composed(state(2, 5), set())[0] == State(2, 5, 2, 5, None, 2, status=Status.INACTIVE)
    assert composed(state(4, 5), {0, 1, 2})[0] == State(1, 2, 4, 5, 1, 2, status=Status.ACTIVE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StableRanks(0), "max_active_world_size must be at least 1, not 0"),
        (lambda: WholeNodes(0), "ranks_per_node must be at least 1, not 0"),
        (lambda: Tree(), "Tree needs at least one Layer"),
        (lambda: Layer(key=str, min_ranks=3, max_ranks=2), "1 <= min_ranks <= max_ranks, not 3 and 2"),
        (lambda: MaxActiveWorldSize(0), "max_active_world_size must be at least 1, not 0"),
        (lambda: ActiveWorldSizeDivisibleBy(0), "divisor must be at least 1, not 0"),
        (lambda: compose(ShiftRanks(), WholeNodes(2)), "needs the hosts of all ranks: write it first"),
        (lambda: compose(), "compose needs at least one hook"),
    ],
)
def test_wrong_arguments_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


class SharedStates:
    """The states of all ranks, each called with the same assignment, in threads as they wait for each other."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts, store = hosts, DictStore()
        self.states = [replace(state(rank, len(hosts)).activate_all_ranks(), store=store) for rank in range(len(hosts))]

    def key(self, rank_state: State) -> str:
        return self._hosts[rank_state.rank]

    def assign(self, assignment: Any, terminated: set[int]) -> dict[int, tuple[State, set[int]]]:
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            alive = [each for each in self.states if each.rank not in terminated]
            return {
                each.rank: outcome
                for each, outcome in zip(alive, pool.map(lambda s: assignment(s, set(terminated)), alive), strict=True)
            }


def test_a_filter_by_key_terminates_groups_of_the_wrong_size_and_composes_in_nvidias_order_too() -> None:
    shared = SharedStates(["a", "a", "b", "b", "c", "c"])
    first = FilterGroupedByKey(shared.key, lambda count: count == 2)
    both = (compose(first, ShiftRanks()), Compose(ShiftRanks(), FilterGroupedByKey(shared.key, lambda n: n == 2)))
    for assignment in both:
        found = shared.assign(assignment, {1})
        assert {rank: (after.rank, after.world_size) for rank, (after, _) in found.items() if rank > 1} == {
            2: (0, 4), 3: (1, 4), 4: (2, 4), 5: (3, 4)
        }  # fmt: skip
        assert found[0][0].status is Status.TERMINATED
        assert all(left == set() for _, left in found.values())
    alone = shared.assign(FilterGroupedByKey("one group", lambda count: count > 5), set())
    assert all(left == set() for _, left in alone.values())


def test_a_filter_by_key_waits_for_the_keys_of_others_for_its_time_out_only() -> None:
    lonely = FilterGroupedByKey("a", lambda count: count == 1, timeout=timedelta(milliseconds=10))
    with pytest.raises(RestartError, match=r"no key of ranks \[1, 2\] within 0.01 s"):
        lonely(SharedStates(["a", "b", "b"]).states[0], set())


def test_the_former_name_of_a_filter_divides_the_active_ranks() -> None:
    assert WorldSizeDivisibleBy(4)(state(5, 6)).status is Status.INACTIVE
    assert WorldSizeDivisibleBy()(state(5, 6)).status is Status.ACTIVE


def test_stable_ranks_look_at_each_rank_a_few_times_only() -> None:
    """16,384 ranks took 10.5 s when each was searched for in the tuple of all others."""

    class Counted(int):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    size = 400
    ranks = [RankPlace(Counted(rank), rank, "") for rank in range(size)]
    arrangement = StableRanks(size // 2).arrange(ranks, {0})
    assert sorted(arrangement.order) == list(range(1, size))
    assert Counted.compared < 20 * size
