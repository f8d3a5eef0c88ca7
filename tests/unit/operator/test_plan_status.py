"""How long the write of a status may be delayed, to be combined with later changes."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.plan.job_status.next_status import MINOR_SECONDS, STARTING_SECONDS, write_delay
from support.operator.build import condition


def starting(store: bool = False, running: str = "WaitingForMinReplicas", **fields: Any) -> dict[str, Any]:
    """Return the status of a job that has not trained yet; `store`: whether its store serves."""
    ready = condition("RendezvousReady", store, "StoreAvailable" if store else "StoreStarting")
    waiting = condition("Running", False, running)
    return {"phase": "Pending", "conditions": [ready, waiting], "replicas": 0, "active": 0} | fields


def training(**fields: Any) -> dict[str, Any]:
    """Return the status of a job that trains."""
    conditions = [condition("RendezvousReady", True, "StoreAvailable"), condition("Running", True, "WorldFormed")]
    return {"phase": "Running", "conditions": conditions, "replicas": 2, "active": 2} | fields


LOST = [condition("RendezvousReady", False, "StoreLost"), condition("Running", True, "WorldFormed")]
NEVER_SERVED = [condition("RendezvousReady", False, "LinkRefused"), *starting()["conditions"][1:]]
CASES = {
    "pods are created": (starting(), starting(replicas=2), STARTING_SECONDS),
    "the store serves": (starting(), starting(store=True), MINOR_SECONDS),
    "a pod runs": (starting(store=True), starting(store=True, phase="Starting"), MINOR_SECONDS),
    "all of them": (starting(), starting(store=True, phase="Starting", replicas=2), MINOR_SECONDS),
    "a pod has no room": (starting(), starting(running="Unschedulable"), 0.0),
    "the store refuses the operator": (starting(), starting(conditions=NEVER_SERVED), 0.0),
    "the first round": (starting(store=True, phase="Starting"), training(), 0.0),
    "a standby pod is lost": (training(), training(replicas=1), MINOR_SECONDS),
    "the store is lost": (training(), training(conditions=LOST), 0.0),
    "a failure": (training(), training(phase="Restarting"), 0.0),
    "a charge": (training(), training(restarts=1), 0.0),
    "a new job": ({}, starting(), 0.0),
}


@pytest.mark.parametrize(("before", "after", "seconds"), CASES.values(), ids=CASES)
def test_only_counts_and_the_steps_of_a_start_may_be_written_later(
    before: dict[str, Any], after: dict[str, Any], seconds: float
) -> None:
    assert write_delay(after, before) == seconds
