"""Deadline, deletion after the end, which pods are cleaned up, and jobs of other controllers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import DeleteJob, DeletePod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan import Plan
from support.operator.build import (
    NOW,
    UID,
    condition,
    ended,
    events_of,
    job,
    reasons_of,
    run,
    status,
    status_of,
    steady,
    store,
    worker,
)

COMPLETE = [condition("SuccessCriteriaMet"), condition("Complete")]


def with_spec(observed: Observed, fields: dict[str, Any], **spec: Any) -> Observed:
    """Return the job with these fields of spec and status."""
    return replace(observed, job=job(status=status(**fields), **spec))


def deleted(p: Plan) -> set[str]:
    return {a.name for a in p.actions if isinstance(a, DeletePod)}


# ---- activeDeadlineSeconds


def test_before_its_deadline_a_job_is_looked_at_again_in_time() -> None:
    observed = with_spec(steady(), {"startTime": timestamp(NOW - 100)}, activeDeadlineSeconds=160)
    assert run(observed).requeue_after == pytest.approx(60)


def test_after_its_deadline_a_job_fails_and_its_pods_are_deleted_at_once() -> None:
    p = run(with_spec(steady(), {"startTime": timestamp(NOW - 100)}, activeDeadlineSeconds=100))
    assert reasons_of(p)["FailureTarget"] == ("True", "DeadlineExceeded")
    assert deleted(p) == {"bert-0-0", "bert-1-0"}


def test_a_suspended_job_has_no_deadline() -> None:
    observed = with_spec(steady(), {"startTime": timestamp(NOW - 100)}, activeDeadlineSeconds=50, suspend=True)
    assert "FailureTarget" not in reasons_of(run(observed))


# ---- ttlSecondsAfterFinished


def finished(*, seconds_ago: float, **spec: Any) -> Observed:
    fields = {"conditions": COMPLETE, "completionTime": timestamp(NOW - seconds_ago), "phase": "Succeeded"}
    return with_spec(steady(workers=(worker(0, **ended(0)),)), fields, **spec)


def test_a_finished_job_is_deleted_after_its_time() -> None:
    assert (
        DeleteJob(UID, "it has been finished for 30 seconds")
        in run(finished(seconds_ago=30, ttlSecondsAfterFinished=30)).actions
    )
    early = run(finished(seconds_ago=10, ttlSecondsAfterFinished=30))
    assert not any(isinstance(a, DeleteJob) for a in early.actions)
    assert early.requeue_after == pytest.approx(20)


def test_without_a_time_a_finished_job_stays() -> None:
    assert not any(isinstance(a, DeleteJob) for a in run(finished(seconds_ago=1e6)).actions)


def test_a_job_whose_pods_still_end_is_not_deleted() -> None:
    observed = with_spec(steady(), {"conditions": COMPLETE[:1]}, ttlSecondsAfterFinished=0)
    assert not any(isinstance(a, DeleteJob) for a in run(observed).actions)


# ---- cleanPodPolicy


@pytest.mark.parametrize(
    ("policy", "while_ending", "at_the_end"),
    [
        ("Running", {"bert-1-0"}, {"bert-rdzv-0"}),
        ("None", set(), {"bert-rdzv-0"}),
        ("All", {"bert-1-0"}, {"bert-0-0", "bert-1-0", "bert-rdzv-0"}),
    ],
)
def test_which_pods_are_deleted(policy: str, while_ending: set[str], at_the_end: set[str]) -> None:
    ending = [condition("FailureTarget", at=NOW - 60)]
    pods = (worker(0, **ended(1)), worker(1))
    p = run(with_spec(steady(workers=pods), {"conditions": ending}, cleanPodPolicy=policy))
    assert deleted(p) == while_ending
    fields = {"conditions": [*ending, condition("Failed")], "completionTime": timestamp(NOW)}
    done = steady(workers=(worker(0, **ended(1)), worker(1, **ended(1))))
    done = replace(done, stores=(store(),))
    assert deleted(run(with_spec(done, fields, cleanPodPolicy=policy))) == at_the_end


# ---- managedBy


def test_a_job_of_another_controller_is_left_alone() -> None:
    other = Observed(job=job(managedBy="kueue.x-k8s.io/multikueue"))
    assert run(other) == Plan()
    assert run(Observed(job=job(managedBy="elasticjob.dev/elasticjob-controller"))).actions


# ---- a spec that changes after the end


@pytest.mark.parametrize(("known", "events"), [(1, ["FinishedJobChanged"]), (2, [])])
def test_a_change_of_a_finished_job_is_an_event_that_says_what_to_do(known: int, events: list[str]) -> None:
    finished = job(status=status(conditions=COMPLETE, observedGeneration=known), generation=2, suspend=True)
    p = run(replace(steady(), job=finished))
    assert events_of(p) == events
    assert (status_of(p)["observedGeneration"], status_of(p)["phase"]) == (2, "Succeeded")
    sentence = "To run it again, delete it and apply it again, or apply it under a new name"
    assert all(event.message.endswith(sentence) and not event.warning for event in p.event_records)
