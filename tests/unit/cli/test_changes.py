"""`elasticjob scale`, `suspend`, `resume` and `drain`: what is written, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob.cli.objects import waiting
from elasticjob.cli.objects.waiting import describe_job
from elasticjob.cli.verbs import drain
from support.cli.fake_api import JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod, condition_of

from .conftest import Run


@pytest.fixture(autouse=True)
def job(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "RETRY_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.01)
    api.lists[JOBS], api.lists[PODS] = [a_job()], [a_pod(0), a_pod(0, role="store")]


def status_of(api: FakeApi) -> dict[str, Any]:
    status: dict[str, Any] = api.lists[JOBS][0]["status"]
    return status


def test_scale_writes_the_scale_subresource(api: FakeApi, run: Run) -> None:
    shown = run("scale", "bert", "3")
    assert shown.code == 0
    assert api.changes() == [("PATCH", f"{JOBS}/bert/scale", {"spec": {"replicas": 3}})]
    assert shown.out == "bert: 3 worker pods wanted, 2 before, 2 train now\n"


def test_a_refused_size_says_which_sizes_there_are(api: FakeApi, run: Run) -> None:
    api.refused = {f"{JOBS}/bert/scale": (422, "spec.replicas: Invalid value")}
    assert run("scale", "bert", "9").err == (
        "elasticjob scale: bert has from 1 to 4 worker pods: change elasticPolicy to get 9\n"
    )
    del api.lists[JOBS][0]["spec"]["elasticPolicy"]
    assert "the size of bert is fixed: elasticjob suspend bert" in run("scale", "bert", "3").err
    api.refused = {f"{JOBS}/bert/scale": (403, "no")}
    assert "you may not patch elasticjobs bert: no" in run("scale", "bert", "3").err


def test_how_far_a_job_is_does_not_say_twice_that_it_starts() -> None:
    job = a_job()
    waiting = condition_of("Running", "False", "WaitingForMinReplicas", "starting: 0 of at least 2 pods ready")
    job["status"] |= {"phase": "Pending", "conditions": [waiting]}
    assert describe_job(job) == "Pending: 0 of at least 2 pods ready"


def test_wait_follows_the_job_until_it_is_as_wanted(api: FakeApi, run: Run) -> None:
    status_of(api)["conditions"][2] = condition_of("FullyScaled", "False", "ScalingUp", "training on 2 of 3 pods")
    full = a_job()
    trains = condition_of("FullyScaled", "True", "AtDesiredReplicas", "training on 3 of 3 pods")
    full["status"]["conditions"][2] = trains
    api.watches[JOBS] = [{"type": "MODIFIED", "object": full}]
    shown = run("scale", "bert", "3", "--wait")
    assert shown.code == 0
    assert shown.err.splitlines() == ["  Running: training on 2 of 3 pods", "  Running: training on 3 of 3 pods"]
    assert shown.out.splitlines()[-1] == "3 worker pods of bert train"


def test_wait_does_not_take_a_status_of_the_spec_before(api: FakeApi, run: Run) -> None:
    api.lists[JOBS][0]["metadata"]["generation"] = 2
    seen = a_job()
    seen["metadata"]["generation"] = seen["status"]["observedGeneration"] = 2
    seen["status"]["phase"] = "Scaling"
    api.watches[JOBS] = [{"type": "MODIFIED", "object": seen}]
    assert "Scaling" in run("scale", "bert", "3", "--wait").err


def test_wait_ends_with_the_job_or_the_time(api: FakeApi, run: Run) -> None:
    status_of(api)["conditions"] = [condition_of("FullyScaled", "False", "ScalingUp")]
    shown = run("scale", "bert", "3", "--wait", "--timeout", "0")
    assert (shown.code, "not within 0 s: 3 worker pods of bert train; elasticjob why bert" in shown.err) == (1, True)
    ended = a_job()
    ended["status"]["conditions"] = [condition_of("Failed", "True", "MaxRestartsExceeded")]
    api.watches[JOBS] = [{"type": "MODIFIED", "object": ended}]
    assert "bert has ended before 3 worker pods of bert train" in run("scale", "bert", "3", "--wait").err
    api.lists[JOBS] = [ended]
    assert "bert has ended: its size cannot change" in run("scale", "bert", "3").err
    assert "neither suspended nor resumed" in run("suspend", "bert").err


def test_suspend_and_resume(api: FakeApi, run: Run) -> None:
    empty = a_job(suspend=True)
    empty["status"] |= {"replicas": 0, "conditions": [condition_of("Suspended", "True", "SuspendedByUser", "no pods")]}
    api.watches[JOBS] = [{"type": "MODIFIED", "object": empty}]
    shown = run("suspend", "bert", "--wait")
    assert (shown.code, shown.out.splitlines()[-1]) == (
        0,
        "bert has no worker pods; elasticjob resume bert lets it go on",
    )
    assert api.changes()[-1] == ("PATCH", f"{JOBS}/bert", {"spec": {"suspend": True}})
    assert run("resume", "bert").out == "bert was not suspended\n"
    assert len(api.changes()) == 1
    api.lists[JOBS] = [empty]
    api.watches[JOBS] = [{"type": "MODIFIED", "object": a_job()}]
    assert run("resume", "bert", "--wait").out.splitlines()[-1] == "bert trains"
    assert api.changes()[-1][2] == {"spec": {"suspend": False}}


def test_drain_evicts_a_worker_pod(api: FakeApi, run: Run) -> None:
    shown = run("drain", "bert-0-0")
    assert shown.code == 0
    assert "bert-0-0 leaves Node node0" in shown.out
    ((method, url, body),) = api.changes()
    assert (method, url.partition("?")[0]) == ("POST", f"{PODS}/bert-0-0/eviction")
    assert body == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "bert-0-0", "namespace": "team"},
    }
    assert "is no worker pod of a job" in run("drain", "bert-rdzv-0").err


def test_drain_says_what_a_budget_that_refuses_needs(api: FakeApi, run: Run) -> None:
    api.refused = {f"{PODS}/bert-0-0/eviction": (429, "Cannot evict pod")}
    shown = run("drain", "bert-0-0")
    assert (shown.code, "bert has no pod to spare" in shown.err, "--force" in shown.err) == (1, True, True)
    assert run("drain", "bert-0-0", "--force").code == 0
    assert api.changes()[-1][:2] == ("DELETE", f"{PODS}/bert-0-0")


def test_drain_waits_for_the_end_of_the_pod_and_the_full_size(api: FakeApi, run: Run) -> None:
    answer = api.answer

    def evict(method: str, url: str, body: Any) -> tuple[int, str]:
        result = answer(method, url, body)
        if method == "POST":
            api.lists[PODS] = []
        return result

    api.answer = evict  # type: ignore[method-assign]
    assert run("drain", "bert-0-0", "--wait").out.splitlines()[-1] == "bert trains at full size without bert-0-0"
