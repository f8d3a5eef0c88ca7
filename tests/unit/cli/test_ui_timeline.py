"""The time line of the page, from a job's status and Events, and what it remembers of what a job has reported."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob.cli.ui.progress_samples import MOST_SAMPLES, ProgressSamples
from elasticjob.cli.ui.timeline import FormedRound, formed_rounds, job_timeline
from elasticjob.cli.verbs.events import event_views
from elasticjob_operator.plan.job_status.conditions import describe_world
from elasticjob_operator.plan.training_state import TrainingState
from support.cli.objects import a_job, an_event, condition_of, stamp

NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `stamp` count from NOW."""
    monkeypatch.setattr("time.time", lambda: NOW)


def seconds_ago(time: float) -> int:
    return round(NOW - time)


def failure(ago: float, pod: str = "bert-1-0", **fields: Any) -> dict[str, Any]:
    return {"time": stamp(ago), "pod": pod, "node": "node1", "rank": 3, "class": "Killed", **fields}


def formed(number: int, ago: float) -> dict[str, Any]:
    """What the operator writes, so that a change of its sentence shows here."""
    world = TrainingState(
        formed=True, active=2, ready=2, standby=0, size=4, rounds=number, last_round=None, formed_at=0.0,
        is_new_round=True, outcome=None, outcome_pod="", reason="",
    )  # fmt: skip
    return an_event("WorldFormed", f"round {number}: {describe_world(world)}", ago=ago)


def line(job: dict[str, Any], events: list[dict[str, Any]], pods: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    views = event_views(events, "bert")
    return job_timeline(job, pods or [], views, formed_rounds(job, views, {}), NOW)


def test_rounds_come_from_events_and_the_last_one_from_the_status() -> None:
    job = a_job()
    assert job["status"]["rendezvousRound"] == 3
    rounds = formed_rounds(job, event_views([formed(1, 3000), formed(3, 5)], "bert"), {})
    assert [(r.number, seconds_ago(r.start), r.pods, r.workers) for r in rounds.values()] == [
        (1, 3000, 2, 4), (3, 30, 2, 4),
    ]  # fmt: skip
    seen = FormedRound(1, NOW - 3010, 1, 2)
    assert formed_rounds(job, event_views([formed(1, 3000)], "bert"), {1: seen})[1] == seen


def test_a_round_ends_by_its_fault_or_as_planned_or_with_the_job() -> None:
    job = a_job()
    job["status"] |= {"recentFailures": [failure(1000)], "rendezvousRound": 3}
    events = [formed(1, 3000), formed(2, 998), an_event("ScalingUp", "scaling from 1 to 2 pods", ago=40)]
    shown = line(job, events)
    assert [(r["number"], r["how"], r.get("cause", "")) for r in shown["rounds"]] == [
        (1, "fault", "Killed of bert-1-0 rank 3"), (2, "planned", "ScalingUp: scaling from 1 to 2 pods"),
        (3, "training", ""),
    ]  # fmt: skip
    assert [seconds_ago(r["end"]) for r in shown["rounds"][:2]] == [1000, 30]
    assert [(seconds_ago(f["time"]), f["pod"], f["node"]) for f in shown["faults"]] == [(1000, "bert-1-0", "node1")]
    assert [change["reason"] for change in shown["changes"]] == ["ScalingUp"]
    assert (seconds_ago(shown["start"]), seconds_ago(shown["end"])) == (3600, 0)


def test_a_round_whose_workers_are_down_has_ended() -> None:
    job = a_job()
    job["status"] |= {
        "recentFailures": [failure(12)], "conditions": [condition_of("Running", "False", "Restarting", ago=10)],
    }  # fmt: skip
    events = [formed(3, 100)]
    (shown,) = line(job, events)["rounds"]
    assert (shown["number"], shown["how"], seconds_ago(shown["end"])) == (3, "fault", 12)


def test_the_last_round_of_a_job_that_succeeded_ended_with_the_job() -> None:
    job = a_job()
    job["status"] |= {
        "completionTime": stamp(20), "conditions": [condition_of("Complete", "True", "AllAgentsSucceeded")],
    }  # fmt: skip
    shown = line(job, [formed(3, 100)])
    assert (shown["rounds"][0]["how"], seconds_ago(shown["rounds"][0]["end"])) == ("ended", 20)
    assert seconds_ago(shown["end"]) == 20


def test_a_recovery_has_its_phases_and_a_lost_pod_has_a_lane() -> None:
    job = a_job()
    phases = {"detect": 0.5, "stop": 1.0, "rendezvous": 0.25, "start": 2.25}
    job["status"]["recentFailures"] = [failure(500, recoverySeconds=phases), failure(90, "bert-0-1")]
    pods = [
        {"name": "bert-0-1", "role": "worker", "node": "node0", "created": stamp(400), "state": "Running"},
        {"name": "bert-rdzv-0", "role": "store", "state": "Running"},
    ]
    shown = line(job, [], pods)
    (recovery,) = shown["recoveries"]
    assert [(p["name"], p["seconds"]) for p in recovery["phases"]] == list(phases.items())
    assert recovery["end"] - recovery["start"] == 4.0
    assert [(lane["pod"], lane["state"], "start" in lane) for lane in shown["lanes"]] == [
        ("bert-0-1", "Running", True), ("bert-1-0", "gone", False),
    ]  # fmt: skip


def test_faults_in_the_same_second_as_a_new_round_end_the_round_that_they_hit() -> None:
    job = a_job()
    job["status"] |= {"recentFailures": [failure(100), failure(100, "bert-0-0"), failure(98)], "rendezvousRound": 4}
    seen = {n: FormedRound(n, NOW - ago, 2, 4) for n, ago in ((1, 900.0), (2, 99.6), (3, 97.9))}
    shown = job_timeline(job, [], [], formed_rounds(job, [], seen), NOW)
    assert [(r["number"], r["how"], r.get("cause", "")[-15:]) for r in shown["rounds"]] == [
        (1, "fault", "bert-1-0 rank 3"), (2, "fault", "bert-1-0 rank 3"), (3, "planned", ""), (4, "training", ""),
    ]  # fmt: skip


def test_a_job_without_a_status_has_an_empty_time_line() -> None:
    shown = line(a_job(status={}), [])
    assert (shown["rounds"], shown["faults"], shown["lanes"]) == ([], [], [])
    assert shown["end"] > shown["start"]


def progress(step: int | None, at: float, **metrics: str) -> dict[str, Any]:
    listed = [{"name": name, "value": value} for name, value in metrics.items()]
    return {"step": step, "metrics": listed, "lastUpdatedTime": stamp(-at)}


def test_samples_have_the_numbers_and_the_speed_between_two_reports() -> None:
    kept = ProgressSamples()
    for report in (
        progress(10, 0, loss="2.5", note="warm", bad="nan"), progress(10, 0, loss="2.5"), progress(70, 30, loss="1"),
        progress(40, 60),
    ):  # fmt: skip
        kept.add(report, NOW)
    assert [(s["step"], s.get("stepsPerSecond"), s.get("metrics")) for s in kept.samples] == [
        (10, None, {"loss": 2.5}), (70, 2.0, {"loss": 1.0}), (40, None, None),
    ]  # fmt: skip
    kept.add({}, NOW + 90)
    assert len(kept.samples) == 3


def test_samples_are_bounded_and_cover_the_whole_time() -> None:
    kept = ProgressSamples()
    for index in range(3 * MOST_SAMPLES):
        kept.add({"step": index}, NOW + index)
    assert len(kept.samples) <= MOST_SAMPLES + 1
    assert (kept.samples[0]["step"], kept.samples[-1]["step"]) == (0, 3 * MOST_SAMPLES - 1)
