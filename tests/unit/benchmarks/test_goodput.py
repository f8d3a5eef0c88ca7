"""Goodput and recovery figures from steps and faults."""

from __future__ import annotations

import math

import pytest
from benchmarks.goodput import Fault, Step, goodput, recoveries, summary

STEADY = [Step(float(n), n, 3) for n in range(11)]


def test_undisturbed_training_has_goodput_one() -> None:
    assert goodput(STEADY, [Fault(4.5, "a", "")]) == 1.0


def test_a_pause_lowers_goodput() -> None:
    later = [Step(n + 10.0, n, 3) for n in range(11, 21)]
    assert goodput([*STEADY, *later], [Fault(10.5, "a", "")]) == pytest.approx(20 / 30)


def test_steps_that_are_done_again_lower_goodput() -> None:
    again = [Step(7.0 + n, n, 3) for n in range(6, 14)]  # steps 6 to 10 a second time, after a pause of 3 s
    assert goodput([*STEADY, *again], [Fault(10.5, "a", "")]) == pytest.approx(13 / 20)


def test_a_join_after_the_recovery_counts_and_slow_steps_do_not() -> None:
    slow = [Step(10.0 + 2 * n, 10 + n, 2) for n in range(1, 4)]  # the machine is busy; the world changes once
    joined = [Step(16.0 + 4 + n, 14 + n, 3) for n in range(8)]
    # The change to two nodes cost 2 - 1 s, the join 4 - 1 s.
    assert goodput([*STEADY, *slow, *joined], [Fault(10.5, "a", "")]) == pytest.approx(1 - 4 / 27)


def test_all_ranks_of_a_step_are_one_step() -> None:
    ranks = [Step(s.time + lag, s.step, 3) for s in STEADY for lag in (0.0, 0.1)]
    assert goodput(ranks, []) == 1.0


def test_the_pause_begins_with_the_last_step_before_the_fault() -> None:
    steps = [Step(1.0, 1, 3), Step(1.5, 2, 3), Step(3.5, 3, 2), Step(3.7, 4, 3)]
    [found] = recoveries(steps, [Fault(2.0, "pod deleted", "", 3)])
    assert found.pause == pytest.approx(2.0)
    assert found.full_size == pytest.approx(1.7)


def test_a_step_of_the_old_world_is_not_full_size_again() -> None:
    steps = [Step(1.0, 1, 3), Step(2.01, 2, 3), Step(3.0, 3, 2)]
    [found] = recoveries(steps, [Fault(2.0, "pod deleted", "", 3)])
    assert found.full_size is None


def test_steps_after_the_next_fault_do_not_count_for_the_fault_before() -> None:
    steps = [Step(1.0, 1, 3), Step(9.0, 2, 3)]
    first, second = recoveries(steps, [Fault(2.0, "a", "", 3), Fault(3.0, "b", "", 3)])
    assert (first.pause, first.full_size) == (None, None)
    assert second.pause == pytest.approx(8.0)


def test_the_summary_names_each_kind_once() -> None:
    injected = [Fault(2.5, "a", "", 3), Fault(4.5, "b", "", 3), Fault(6.5, "a", "", 3)]
    figures = summary(STEADY, injected)
    assert figures["steps"] == 10
    faults = figures["faults"]
    assert isinstance(faults, list)
    assert [(f["fault"], f["times"], f["recovered"]) for f in faults] == [("a", 2, 2), ("b", 1, 1)]
    assert all(math.isclose(f["p50"], 1.0) for f in faults)
