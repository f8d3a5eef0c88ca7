"""The operator is killed, or loses the API server, at some of its writes; tests/model does so at all of them."""

from __future__ import annotations

import pytest

from support.operator.process import OUTAGES, Fault
from support.operator.scenarios import DRAIN_WITHOUT_ORDER, SCENARIOS, Scenario, play, play_with_fault

pytestmark = pytest.mark.slow
FAULTS = [fault for fault in Fault if fault not in OUTAGES]
LASTING = [*OUTAGES]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_fault_at_a_write_changes_nothing_in_the_end(scenario: Scenario) -> None:
    """Every twelfth write meets a fault, each kind in turn."""
    first, writes = SCENARIOS.index(scenario), len(play(scenario).writes)
    for number, at in enumerate(range(first % min(12, writes), writes, 12), first):
        play_with_fault(scenario, FAULTS[number % len(FAULTS)], at)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_an_outage_changes_nothing_in_the_end(scenario: Scenario) -> None:
    """Each kind of outage in turn."""
    play_with_fault(scenario, LASTING[SCENARIOS.index(scenario) % len(LASTING)], 1)


def test_a_policy_that_the_api_server_is_too_busy_to_read_is_not_taken_for_deleted() -> None:
    (fails,) = (scenario for scenario in SCENARIOS if scenario.name == "fails")
    (deletion,) = (at for at, write in enumerate(play(fails).writes) if "DELETE /apis/policy" in write)
    play_with_fault(fails, Fault.THROTTLED_AT_TIMES, deletion)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_watches_that_are_30_s_late_create_and_delete_nothing_else(scenario: Scenario) -> None:
    sim = play_with_fault(scenario, None, lag=30.0)
    assert len(sim.server.created) == play(scenario).created


def test_a_job_at_its_minimum_leaves_a_node_that_an_autoscaler_asks_for() -> None:
    """It starts as many pods as are there, which leave once the others are ready, and both of its stores move."""
    played = play(DRAIN_WITHOUT_ORDER)
    assert played.created == 3 + 3 + 2
    assert sorted(pod for pod in played.deleted if "rdzv" not in pod) == [f"bert-{index}" for index in range(6)]
