"""Pods that do not start: a failed init container, or an eviction for the pod's own use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import CreateWorker
from elasticjob_operator.model.cluster.pods import Pod, parse_pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan.pods.start_attempts import FIRST_START_RETRY, LONGEST_START_RETRY
from support.operator.build import (
    NOW,
    Raw,
    condition,
    conditions_of,
    elastic,
    ended,
    events_of,
    evicted,
    failed_init,
    gathering,
    job,
    killed,
    raw_pod,
    report,
    run,
    status,
    status_of,
    steady,
    worker,
)

TRAINS: Raw = {
    "rendezvousRound": 1,
    "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0, "round": "1.0.1"},
}
"""Fields of the status of a job whose first round trains."""
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}


def waiting(*pods: Pod, spec: Raw | None = None, **fields: Any) -> Observed:
    """Return a job of two pods that has not trained yet; `fields` are of its status."""
    observed = steady(workers=pods, last_report=gathering(*(p for p in pods if p.running)))
    return replace(observed, job=job(status=status(**fields), **(spec or {})))


# ---- which pods did not start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pod", "why"),
    [
        ("init", worker(0, **failed_init()), "init container setup failed: exit code 3: no such bucket"),
        (
            "last lines",
            worker(0, **failed_init(message="x\na\nb\n\n")),
            "init container setup failed: exit code 3: a | b",
        ),
        ("silent", worker(0, **failed_init(message="")), "init container setup failed: exit code 3"),
        ("killed", worker(0, **failed_init(code=137, message="")), "init container setup failed: SIGKILL"),
        ("evicted", worker(0, **evicted("too much.")), "evicted: too much."),
        ("its node needs room", worker(0, **(evicted() | {"conditions": [DISRUPTED]})), ""),
        ("the node rejected it", worker(0, phase="Failed", container={"state": {}}), ""),
        ("out of memory", worker(0, **ended(137, "OOMKilled")), ""),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_why_a_pod_did_not_start(name: str, pod: Pod, why: str) -> None:
    assert pod.end is not None
    assert pod.end.start_failure == why


def test_an_init_container_that_succeeded_or_still_runs_is_no_failure() -> None:
    states: tuple[Raw, ...] = (
        {"terminated": {"exitCode": 0}},
        {"running": {}},
        {"waiting": {"reason": "PodInitializing"}},
    )
    for state in states:
        pod = worker(0, phase="Pending", container={"state": {}}, status={"initContainerStatuses": [{"state": state}]})
        assert pod.end is None


def test_a_sidecar_that_was_ended_is_not_the_init_container_that_failed() -> None:
    raw = raw_pod(0, **failed_init())
    ended_too = {"name": "proxy", "state": {"terminated": {"exitCode": 143}}}
    raw["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "setup"}]
    raw["status"]["initContainerStatuses"].insert(0, ended_too)
    end = parse_pod(raw).end
    assert end is not None
    assert end.start_failure.startswith("init container setup failed")


# ---- retries -------------------------------------------------------------------------------------------------------


def test_a_failed_init_container_is_tried_again_after_a_delay_and_status_says_why() -> None:
    observed = waiting(worker(0, **failed_init()), worker(1))
    p = run(observed)
    assert p.actions == ()
    assert p.requeue_after == pytest.approx(FIRST_START_RETRY)
    status_ = status_of(p)
    assert (status_["startFailures"], status_["restarts"]) == (1, 0)
    assert status_["lastFailure"]["class"] == "StartError"
    assert events_of(p, warning=True) == ["PodStartFailed"]
    running = conditions_of(p)["Running"]
    assert (running["status"], running["reason"]) == ("False", "PodStartFailed")
    assert running["message"] == (
        "bert-0-0: init container setup failed: exit code 3: no such bucket; 1 of 10 attempts in a row failed. "
        f"The operator tries again at {timestamp(NOW + FIRST_START_RETRY)}. If the template is wrong, correct it: "
        "set suspend to true in the same change, and to false once the job is suspended"
    )
    assert conditions_of(p)["FullyScaled"]["reason"] == "PodStartFailed"
    again = run(replace(observed, job=job(status=status_)), NOW + 1)
    assert (again.actions, again.event_records, again.status) == ((), (), None)
    due = run(replace(observed, job=job(status=status_)), NOW + FIRST_START_RETRY)
    assert due.actions == (CreateWorker("bert-0-1", 0, 1),)
    assert due.failed_starts == 1
    assert len(status_of(due)["recentFailures"]) == 1
    starting = waiting(worker(0, 1, phase="Pending", failed_starts=1), worker(1), **(status_of(due)))
    assert (
        "1 attempt to start pods failed: see status.lastFailure" in conditions_of(run(starting))["Running"]["message"]
    )


@pytest.mark.parametrize(
    ("in_row", "delay"),
    [(0, 10.0), (1, 20.0), (2, 40.0), (4, 160.0), (5, LONGEST_START_RETRY), (8, LONGEST_START_RETRY)],
)
def test_the_delay_grows_with_each_attempt_that_fails(in_row: int, delay: float) -> None:
    failed = worker(0, **evicted(), failed_starts=7)
    p = run(waiting(failed, worker(1), failedStarts=7, startFailures=in_row))
    assert p.actions == ()
    assert p.requeue_after == pytest.approx(delay)
    assert status_of(p)["startFailures"] == in_row + 1


def test_pods_that_fail_to_start_together_are_one_attempt() -> None:
    both = (worker(0, **failed_init()), worker(1, **failed_init()))
    together = status_of(run(waiting(*both)))
    first = status_of(run(waiting(both[0], worker(1))))
    later = status_of(run(replace(waiting(*both), job=job(status=first)), NOW + 2))
    assert together["startFailures"] == later["startFailures"] == 1
    assert together["lastStartFailureTime"] == later["lastStartFailureTime"] == timestamp(NOW)


def test_a_pod_that_was_created_after_the_attempt_is_the_next_one() -> None:
    pods = (worker(0, 1, **failed_init(), failed_starts=1), worker(1, **failed_init()))
    assert status_of(run(waiting(*pods, incarnations="1,0", failedStarts=1, startFailures=1)))["startFailures"] == 2


def test_a_round_that_starts_ends_the_row() -> None:
    known: Raw = {"failedStarts": 3, "startFailures": 3, "lastStartFailureTime": timestamp(NOW - 60)}
    status_ = status_of(run(steady(**known)))
    assert (status_.get("startFailures"), status_["failedStarts"]) == (None, 3)
    assert status_of(run(steady(**(known | TRAINS))))["startFailures"] == 3


def test_a_pod_that_is_evicted_for_its_own_use_is_not_charged_though_its_container_ran() -> None:
    p = run(steady(workers=(worker(0, **evicted()), worker(1)), last_report=report(worker(1)), **TRAINS))
    status_ = status_of(p)
    assert (status_["restarts"], status_["startFailures"]) == (0, 1)
    assert status_["lastFailure"]["reason"] == "Evicted"
    assert "exceeds the limit" in status_["lastFailure"]["message"]


# ---- the end of the job ---------------------------------------------------------------------------------------------


def given_up(observed: Observed) -> bool:
    found = conditions_of(run(observed))
    return found.get("FailureTarget", {}).get("reason") == "MaxStartFailuresExceeded"


@pytest.mark.parametrize(
    ("name", "in_row", "spec", "pods", "failed"),
    [
        ("tenth attempt", 9, {}, 1, True),
        ("ninth attempt", 8, {}, 1, False),
        ("one attempt only", 0, {"failurePolicy": {"maxStartFailures": 1}}, 1, True),
        ("the others are enough", 9, elastic(1, 2), 1, False),
        ("none is left", 9, elastic(1, 2), 2, True),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_job_fails_after_too_many_attempts_in_a_row(
    name: str, in_row: int, spec: Raw, pods: int, failed: bool
) -> None:
    workers = tuple(worker(i, **failed_init(), failed_starts=9) if i < pods else worker(i) for i in range(2))
    assert given_up(waiting(*workers, spec=spec, failedStarts=9, startFailures=in_row)) is failed


def test_a_job_whose_pods_do_not_start_names_the_cause_and_what_to_do() -> None:
    observed = waiting(worker(0, **failed_init(), failed_starts=9), worker(1), failedStarts=9, startFailures=9)
    p = run(observed)
    message = conditions_of(p)["FailureTarget"]["message"]
    for part in ("10 attempts in a row", "bert-0-0", "setup", "exit code 3", "no such bucket", "maxStartFailures"):
        assert part in message
    assert [e.reason for e in p.event_records if e.warning] == ["PodStartFailed", "MaxStartFailuresExceeded"]
    assert len(status_of(p)["recentFailures"]) == 1
    final = run(replace(observed, job=job(status=status_of(p))), NOW + 100)
    assert [a for a in final.actions if isinstance(a, CreateWorker)] == []


def test_training_goes_on_though_a_joining_pod_does_not_start() -> None:
    spec = {"failurePolicy": {"maxStartFailures": 1}, **elastic(1, 2)}
    trains = status(startFailures=40, failedStarts=40, conditions=[condition("Running")], **TRAINS)
    pods = (worker(0), worker(1, **failed_init(), failed_starts=40))
    p = run(replace(steady(workers=pods, last_report=report(pods[0])), job=job(status=trains, **spec)))
    found = conditions_of(p)
    assert (found["Running"]["status"], "FailureTarget" in found) == ("True", False)
    assert "init container setup failed" in found["FullyScaled"]["message"]


def test_failures_before_a_round_that_are_charged_end_no_job_as_start_failures() -> None:
    observed = waiting(worker(0, **killed(), failed_starts=9), worker(1), failedStarts=9, startFailures=9)
    assert not given_up(observed)
    assert status_of(run(observed))["restarts"] == 1
