"""What the script reports of the training, in status."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Metric, RoundPhase, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.plan import Plan
from support.operator.build import NOW, job, link, report, run, status_of, steady, worker

PODS = (worker(0), worker(1))
PROGRESS = TrainingProgress(RoundId(1, 0, 1), 41, 200, 0.5, (Metric("loss", "0.23"),))
RECORD = {
    "step": 41, "progressPercentage": 20, "estimatedRemainingSeconds": 80,
    "metrics": [{"name": "loss", "value": "0.23"}], "lastUpdatedTime": timestamp(NOW),
}  # fmt: skip


def at(progress: TrainingProgress | None = PROGRESS, *, seconds: float = 0.0, status: Any = None) -> Plan:
    observed = steady(workers=PODS, last_report=report(*PODS, progress=progress))
    if status is not None:
        observed = replace(observed, job=job(status=status))
    return run(observed, now=NOW + seconds)


def test_status_has_the_progress_and_is_written_once() -> None:
    first = at()
    assert status_of(first)["trainerStatus"] == RECORD
    assert at(status=status_of(first), seconds=100).status is None


def test_a_job_that_reports_nothing_has_no_such_field() -> None:
    assert "trainerStatus" not in status_of(at(None))


@pytest.mark.parametrize(
    ("progress", "fields"),
    [
        (replace(PROGRESS, total=None), {"step": 41}),
        (replace(PROGRESS, step_seconds=None), {"step": 41, "progressPercentage": 20}),
        (replace(PROGRESS, step=0), {"step": 0, "progressPercentage": 0, "estimatedRemainingSeconds": 100}),
        (replace(PROGRESS, step=199), {"step": 199, "progressPercentage": 99, "estimatedRemainingSeconds": 1}),
        (replace(PROGRESS, step=300), {"step": 300, "progressPercentage": 100, "estimatedRemainingSeconds": 0}),
        (replace(PROGRESS, total=0), {"step": 41}),
    ],
)
def test_percentage_and_remaining_time(progress: TrainingProgress, fields: dict[str, int]) -> None:
    record = status_of(at(replace(progress, metrics=())))["trainerStatus"]
    assert record == fields | {"lastUpdatedTime": timestamp(NOW)}


def test_names_and_values_fit_the_schema() -> None:
    many = tuple(Metric(f"{i}".rjust(100, "n") + "n" * 100, "1" * 100) for i in range(40))
    metrics = status_of(at(replace(PROGRESS, metrics=many)))["trainerStatus"]["metrics"]
    assert (len(metrics), len(metrics[0]["name"]), len(metrics[0]["value"])) == (32, 128, 64)


def test_metrics_whose_names_are_equal_once_they_are_cut_are_one() -> None:
    """The API server rejects a map list with a key twice, and with it the whole status."""
    same = tuple(Metric("n" * 200 + str(i), str(i)) for i in range(3))
    assert status_of(at(replace(PROGRESS, metrics=same)))["trainerStatus"]["metrics"] == [
        {"name": "n" * 128, "value": "2"}
    ]


@pytest.mark.parametrize("total", [sys.maxsize, 10**400])
def test_a_total_that_is_no_number_of_steps_is_left_out(total: int) -> None:
    record = status_of(at(replace(PROGRESS, total=total, metrics=())))["trainerStatus"]
    assert record == {"step": 41, "lastUpdatedTime": timestamp(NOW)}


def test_the_estimate_of_very_long_training_fits_the_schema() -> None:
    record = status_of(at(replace(PROGRESS, total=2**53, step_seconds=1e6)))["trainerStatus"]
    assert record["estimatedRemainingSeconds"] == 2**53


def test_progress_alone_is_written_twice_a_minute_at_most() -> None:
    before = status_of(at())
    later = replace(PROGRESS, step=42)
    assert at(later, seconds=20, status=before).status is None
    written = status_of(at(later, seconds=30, status=before))["trainerStatus"]
    assert (written["step"], written["lastUpdatedTime"]) == (42, timestamp(NOW + 30))


def test_progress_is_written_with_every_other_change() -> None:
    before = {**status_of(at()), "phase": "Starting"}
    assert status_of(at(replace(PROGRESS, step=42), seconds=1, status=before))["trainerStatus"]["step"] == 42


def test_the_last_progress_stays_while_no_store_knows_one() -> None:
    before = {**status_of(at()), "phase": "Starting"}
    recovering = steady(workers=PODS, last_report=report(*PODS))
    for view in (link(None), link(report(*PODS, phase=RoundPhase.RECOVERING))):
        p = run(replace(recovering, job=job(status=before), link=view))
        assert status_of(p)["trainerStatus"] == RECORD
