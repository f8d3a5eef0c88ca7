"""What faults have cost, in status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticjob._runtime.contract.messages import LostTime
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.plan import Plan
from support.operator.build import NOW, gathering, job, link, report, run, status_of, steady, worker

PODS = (worker(0), worker(1))
FAULT = LostTime(RoundId(1, 0, 2), 10.0)


def at(seconds: float, status: Any = None, *lost: LostTime) -> Plan:
    observed = steady(workers=PODS, last_report=report(*PODS, lost=lost))
    if status is not None:
        observed = replace(observed, job=job(status=status))
    return run(observed, now=NOW + seconds)


def changed(status: dict[str, Any]) -> dict[str, Any]:
    return {**status, "phase": "Starting"}


FIRST = dict(status_of(at(0)))


def test_it_begins_with_the_first_round_and_costs_no_write_of_its_own() -> None:
    assert FIRST["goodput"] == {
        "productiveSeconds": 0, "lostSeconds": 0, "percent": 100, "lastUpdatedTime": timestamp(NOW)
    }  # fmt: skip
    assert at(50, FIRST).status is None
    later = status_of(at(50, changed(FIRST)))["goodput"]
    assert (later["productiveSeconds"], later["lostSeconds"], later["percent"]) == (50, 0, 100)


def test_lost_time_is_counted_once_and_written_alone() -> None:
    after = dict(status_of(at(100, FIRST, FAULT)))
    assert after["goodput"] == {
        "productiveSeconds": 90, "lostSeconds": 10, "percent": 90, "round": "1.0.2",
        "lastRound": {"executionAttempt": 1, "storeIncarnation": 0, "number": 2},
        "lastUpdatedTime": timestamp(NOW + 100),
    }  # fmt: skip
    assert at(101, after, FAULT).status is None
    again = status_of(at(200, after, FAULT, LostTime(RoundId(1, 1, 1), 30.0)))["goodput"]
    assert (again["productiveSeconds"], again["lostSeconds"], again["round"]) == (160, 40, "1.1.1")


def test_it_survives_the_loss_of_store_and_operator() -> None:
    after = dict(status_of(at(100, FIRST, FAULT)))
    successor = steady(workers=PODS, last_report=None)
    p = run(replace(successor, job=job(status=changed(after)), link=link(None)), now=NOW + 150)
    assert status_of(p)["goodput"]["lostSeconds"] == 10


def test_the_time_without_a_round_is_counted_when_the_next_one_runs() -> None:
    observed = steady(workers=PODS, last_report=gathering(*PODS, rounds=1))
    paused = dict(status_of(run(replace(observed, job=job(status=FIRST)), now=NOW + 5)))
    assert paused["goodput"] == FIRST["goodput"]
    after = status_of(at(20, paused, LostTime(RoundId(1, 0, 2), 15.0)))["goodput"]
    assert (after["productiveSeconds"], after["lostSeconds"], after["percent"]) == (5, 15, 25)
