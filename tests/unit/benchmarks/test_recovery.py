"""Samples in which more was lost than the fault explains have no value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.recovery import NEW_PROCESSES, nothing_lost
from benchmarks.row import Sample


@pytest.mark.parametrize(
    ("steps", "parts", "value"),
    [
        ([1, 2, 3], {NEW_PROCESSES: 1.0}, 0.1),
        ([1, 2, 2, 3], {NEW_PROCESSES: 1.0}, None),  # a step was done again
        ([1, 2, 3], {NEW_PROCESSES: 2.0}, None),
        ([1, 2, 3], {}, None),  # not all ranks made a step
    ],
)
def test_only_the_worker_of_the_fault_may_be_replaced(
    steps: list[int], parts: dict[str, float], value: float | None
) -> None:
    events = [SimpleNamespace(step=step, rank=0) for step in steps] + [SimpleNamespace(step=1, rank=1)] * 2
    side: Any = SimpleNamespace(output=SimpleNamespace(steps=lambda: events))
    assert nothing_lost(lambda _: Sample(0.1, parts=parts), replaced=1)(side).value == value
