"""Restarts of a window that starts with its first restart."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.failures.restart_window import RestartWindow


@pytest.mark.parametrize(
    ("seconds", "times", "count", "start"),
    [
        (0, (10.0, 1e9, 2e9), 3, 10.0),
        (60, (10.0, 69.9), 2, 10.0),
        (60, (10.0, 69.9, 70.0), 1, 70.0),
        (60, (10.0, 70.0, 65.0, 129.9), 3, 70.0),
    ],
)
def test_a_window_does_not_slide(seconds: float, times: tuple[float, ...], count: int, start: float) -> None:
    window = RestartWindow()
    for time in times:
        window = window.with_restart(time, seconds)
    assert window == RestartWindow(count, start)


def test_restarts_from_before_the_window_was_set_do_not_count() -> None:
    assert RestartWindow(count=3).at(1_800_000_000.0, 3600) == RestartWindow()
    assert RestartWindow(count=3).at(1_800_000_000.0, 0).count == 3
