"""`elasticjob events` and `elasticjob explain`."""

from __future__ import annotations

import pytest

from elasticjob.cli.verbs.events import event_views
from elasticjob.cli.verbs.explain import advice, all_explanations
from support.cli.fake_api import EVENTS, JOBS, FakeApi
from support.cli.objects import a_job, an_event

from .conftest import Run


def some_events() -> list[dict[str, object]]:
    return [
        an_event("WorldFormed", "round 2", ago=5),
        an_event("FailedScheduling", "0/3 nodes", name="bert-1-0", kind="Pod", ago=50, type_="Warning", count=4),
        an_event("Started", "of another job", name="bert-2-1-0", kind="Pod"),
        an_event("WorldFormed", "of another job", name="bert-2"),
    ]


def test_events_of_a_job_and_its_pods_in_order_of_time(api: FakeApi, run: Run) -> None:
    api.lists[JOBS], api.lists[EVENTS] = [a_job()], some_events()
    lines = run("events", "bert").out.splitlines()
    assert [line.split()[1:4] for line in lines[1:]] == [
        ["Warning", "FailedScheduling", "pod/bert-1-0"],
        ["Normal", "WorldFormed", "elasticjob/bert"],
    ]
    assert "0/3 nodes (x4)" in lines[1]
    assert [event["reason"] for event in run("events", "bert", "--warnings", "-o", "json").view] == ["FailedScheduling"]
    assert [event["object"] for event in event_views(some_events(), None)] == ["elasticjob/bert-2", "elasticjob/bert"]


def test_new_events_follow_and_a_watch_that_is_too_old_begins_again(api: FakeApi, run: Run) -> None:
    api.lists[JOBS] = [a_job()]
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    api.watches[EVENTS] = [{"type": "ADDED", "object": an_event("Scaled", "to 3 nodes")}, gone]
    answer, seen = api.answer, 0

    def answer_or_interrupt(method: str, url: str, body: dict[str, object] | None) -> tuple[int, str]:
        nonlocal seen
        seen += "watch" in url
        return answer(method, url, body) if seen < 2 else (403, '{"message": "the test ends here"}')

    api.answer = answer_or_interrupt  # type: ignore[method-assign]
    shown = run("events", "bert", "-w")
    assert shown.code == 1
    assert "to 3 nodes" in shown.out
    assert "the test ends here" in shown.err
    assert "too old" not in shown.err


def test_a_job_that_does_not_exist_is_an_error(run: Run) -> None:
    shown = run("events", "nobody")
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == 'elasticjob events: elasticjobs.elasticjob.dev "nobody" not found\n'


@pytest.mark.parametrize("name", ["Unschedulable", "oomkilled", "Degraded", "StoreLost"])
def test_explain_knows_conditions_events_phases_and_failures(name: str, run: Run) -> None:
    shown = run("explain", name)
    assert shown.code == 0
    assert name.lower() in shown.out.lower()
    assert run("explain", name, "-o", "json").view[0]["meaning"]


def test_explain_suggests_similar_names(run: Run) -> None:
    shown = run("explain", "Unscheduleable")
    assert shown.code == 1
    assert "did you mean Unschedulable" in shown.err


def test_explain_says_what_to_do(run: Run) -> None:
    assert "What to do: raise resources.limits.memory" in run("explain", "OOMKilled").out


def test_explain_breaks_no_name_that_a_person_copies(run: Run) -> None:
    assert "elasticjob.dev/job-name=JOB,elasticjob.dev/role=store" in run("explain", "StoreLost").out


def test_each_reason_says_what_it_means_and_what_to_do() -> None:
    known = [item for item in all_explanations() if item["kind"] != "phase"]
    assert [item["name"] for item in known if not item["meaning"]] == []
    assert sorted({item["name"] for item in known if not advice(item["name"])}) == []
    assert "progressTimeoutSeconds" in advice("HangDetected")
