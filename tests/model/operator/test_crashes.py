"""Each scenario with each fault at each write of the operator: the end is the same. `tests/unit` plays a sample."""

from __future__ import annotations

import pytest

from support.operator.process import OUTAGES, Fault
from support.operator.scenarios import SCENARIOS, Scenario, play, play_with_fault

DELETIONS = (Fault.DELETED, Fault.DELETED_AND_KILLED)
STEPS = dict.fromkeys(OUTAGES, 6) | dict.fromkeys(DELETIONS, 3)
"""One of so many writes meets this fault, without `--wide`; every write meets the other faults."""


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_fault_at_any_write_changes_nothing_in_the_end(scenario: Scenario, fault: Fault, wide: bool) -> None:
    for at in range(0, len(play(scenario).writes), 1 if wide else STEPS.get(fault, 1)):
        play_with_fault(scenario, fault, at)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_an_operator_that_is_killed_while_watches_are_late_changes_nothing_in_the_end(
    scenario: Scenario, wide: bool
) -> None:
    for at in range(0, len(play(scenario).writes), 1 if wide else 5):
        play_with_fault(scenario, Fault.KILL_AFTER, at, lag=30.0)
