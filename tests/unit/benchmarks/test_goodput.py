"""What a soak's steps and faults amount to."""

from __future__ import annotations

import math

import pytest
from benchmarks.goodput import Deed, Step, after, goodput, summary

STEADY = [Step(float(n), n, 3) for n in range(11)]


def test_undisturbed_training_is_all_good() -> None:
    assert goodput(STEADY) == 1.0


def test_a_pause_is_lost() -> None:
    assert goodput([*STEADY, *(Step(n + 10.0, n, 3) for n in range(11, 21))]) == pytest.approx(20 / 30)


def test_steps_done_again_count_once() -> None:
    again = [Step(11.0 + n, 6 + n, 3) for n in range(5)]  # steps 6 to 10 a second time
    assert goodput([*STEADY, *again]) == pytest.approx(10 / 15)


def test_the_pause_begins_with_the_last_step_before_the_fault() -> None:
    steps = [Step(1.0, 1, 3), Step(1.5, 2, 3), Step(3.5, 3, 2), Step(3.7, 4, 3)]
    [found] = after(steps, [Deed(2.0, "pod deleted", "", 3)])
    assert found.standstill == pytest.approx(2.0)
    assert found.full_size == pytest.approx(1.7)


def test_a_step_of_the_old_world_is_not_full_size_again() -> None:
    steps = [Step(1.0, 1, 3), Step(2.01, 2, 3), Step(3.0, 3, 2)]
    [found] = after(steps, [Deed(2.0, "pod deleted", "", 3)])
    assert found.full_size is None


def test_what_follows_the_next_fault_is_not_counted_for_the_one_before() -> None:
    steps = [Step(1.0, 1, 3), Step(9.0, 2, 3)]
    first, second = after(steps, [Deed(2.0, "a", "", 3), Deed(3.0, "b", "", 3)])
    assert (first.standstill, first.full_size) == (None, None)
    assert second.standstill == pytest.approx(8.0)


def test_the_summary_names_each_kind_once() -> None:
    deeds = [Deed(2.5, "a", "", 3), Deed(4.5, "b", "", 3), Deed(6.5, "a", "", 3)]
    told = summary(STEADY, deeds)
    assert told["steps"] == 10
    faults = told["faults"]
    assert isinstance(faults, list)
    assert [(f["fault"], f["times"], f["recovered"]) for f in faults] == [("a", 2, 2), ("b", 1, 1)]
    assert all(math.isclose(f["p50"], 1.0) for f in faults)
