"""What the page is told: the views of the verbs, read for many pages at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elasticjob.cli.cluster.connection import connect_to_cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.ui.feed import JobFeed
from elasticjob.cli.ui.recent import MOST_VALUES, BusyError, RecentValues
from support.cli.fake_api import EVENTS, JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod, an_event, stamp


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def feed(api: FakeApi, clock: Clock) -> JobFeed:
    return JobFeed(connect_to_cluster(None, None, None), all_namespaces=False, recent=RecentValues(clock))


def test_one_job_has_what_the_verbs_show_and_a_time_line(api: FakeApi, feed: JobFeed) -> None:
    job = a_job()
    job["status"] |= {"trainerStatus": {"step": 5, "metrics": [{"name": "loss", "value": "2"}]}}
    api.lists[JOBS] = [job]
    api.lists[PODS] = [a_pod(0), a_pod(1)]
    api.lists[EVENTS] = [an_event("WorldFormed", "round 2: training on 1 pod with 2 workers", ago=300)]
    api.lists["/api/v1/nodes"] = []
    api.lists["/api/v1/namespaces/team/resourcequotas"] = []
    api.logs["bert-0-0"] = ["2026-01-01T00:00:00Z [agent] bert-0-0: round 1.0.3 formed: 2 pods, ranks 0-1 of 4 here"]
    view = feed.job("team", "bert")
    assert (view["job"]["phase"], view["job"]["pods"][0]["ranks"], view["causes"]) == ("Running", [0, 1], [])
    assert [r["number"] for r in view["timeline"]["rounds"]] == [2, 3]
    assert [sample["step"] for sample in view["samples"]] == [5]
    assert [event["reason"] for event in view["events"]] == ["WorldFormed"]
    assert "notRead" not in view  # a cluster without metrics-server is no problem


def test_what_was_seen_stays_when_the_events_are_gone_until_the_job_is(
    api: FakeApi, feed: JobFeed, clock: Clock
) -> None:
    job = a_job()
    api.lists[JOBS] = [job]
    feed.jobs()
    job["status"] |= {"rendezvousRound": 4, "lastRendezvousTime": stamp(1)}
    clock.now += 60
    assert [r["number"] for r in feed.job("team", "bert")["timeline"]["rounds"]] == [3, 4]
    api.lists[JOBS] = []
    clock.now += 60
    assert feed.jobs()["jobs"] == []
    with pytest.raises(RefusedError, match="not found"):
        feed.job("team", "bert")
    api.lists[JOBS] = [job]
    clock.now += 60
    assert [r["number"] for r in feed.job("team", "bert")["timeline"]["rounds"]] == [4]


def test_what_the_user_may_not_read_is_left_out_and_said(api: FakeApi, feed: JobFeed) -> None:
    api.lists[JOBS] = [a_job()]
    api.refused = {"/api/v1/": (403, 'pods is forbidden: User "eve" cannot list resource "pods"')}
    view = feed.job("team", "bert")
    assert view["job"]["training"] == 2
    assert list(view["notRead"]) == ["pods", "events"]
    assert view["notRead"]["pods"].startswith("you may not list pods")


def test_nodes_and_quotas_are_only_read_to_explain_missing_pods(api: FakeApi, feed: JobFeed, clock: Clock) -> None:
    job = a_job()
    api.lists[JOBS] = [job]
    feed.job("team", "bert")
    assert not any("/nodes" in url or "/resourcequotas" in url for _, url, _ in api.requests)
    job["status"]["conditions"][2] |= {"status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    job["status"]["active"] = 1
    clock.now += 2
    (cause,) = feed.job("team", "bert")["causes"]
    assert "trains with 1 of 2 worker pods" in cause["what"]
    assert any("/nodes" in url for _, url, _ in api.requests)


def test_another_namespace_is_only_served_to_who_asked_for_all(api: FakeApi, feed: JobFeed) -> None:
    with pytest.raises(RefusedError, match="this page shows namespace team"):
        feed.job("other", "bert")
    assert api.requests == []
    elsewhere = JOBS.replace("/team/", "/other/")
    api.lists[elsewhere] = [a_job()]
    everywhere = JobFeed(connect_to_cluster(None, None, None), all_namespaces=True)
    assert everywhere.job("other", "bert")["job"]["name"] == "bert"
    api.lists["/apis/elasticjob.dev/v1alpha1/elasticjobs"] = [a_job(), a_job("gpt")]
    assert [job["name"] for job in everywhere.jobs()["jobs"]] == ["bert", "gpt"]
    assert everywhere.jobs()["namespace"] is None


def test_logs_are_read_again_only_for_another_round(api: FakeApi, feed: JobFeed, clock: Clock) -> None:
    job = a_job()
    api.lists[JOBS], api.lists[PODS] = [job], [a_pod(0)]

    def logs_read() -> int:
        clock.now += 2
        feed.job("team", "bert")
        found = sum("/log?" in url for _, url, _ in api.requests)
        api.requests.clear()
        return found

    assert [logs_read(), logs_read()] == [1, 0]
    job["status"]["rendezvousRound"] = 4
    assert [logs_read(), logs_read()] == [1, 0]


def test_many_pages_read_the_cluster_once(api: FakeApi, feed: JobFeed, clock: Clock) -> None:
    api.lists[JOBS] = [a_job()]
    for _ in range(5):
        feed.jobs()
    assert len(api.requests) == 1
    clock.now += 1.5
    feed.jobs()
    assert len(api.requests) == 2


def test_who_waits_for_a_read_that_hangs_is_told_so() -> None:
    recent, reads, goes_on = RecentValues(), threading.Event(), threading.Event()

    def hang() -> str:
        reads.set()
        assert goes_on.wait(20)
        return "late"

    thread = threading.Thread(target=lambda: recent.get("jobs", 1.0, hang))
    thread.start()
    assert reads.wait(20)
    with pytest.raises(BusyError, match="the API server has not answered for"):
        recent.get("jobs", 1.0, lambda: "not called", wait=0.01)
    goes_on.set()
    thread.join()
    assert recent.get("jobs", 60.0, lambda: "not called") == "late"


def test_an_error_is_not_kept_and_values_are_bounded() -> None:
    recent = RecentValues()

    def fail() -> str:
        raise ClusterError("no")

    with pytest.raises(ClusterError):
        recent.get("a", 60.0, fail)
    assert recent.get("a", 60.0, lambda: "yes") == "yes"
    for number in range(MOST_VALUES + 5):
        recent.get(number, 60.0, lambda: "yes")
    assert len(recent.values) == MOST_VALUES


def test_no_file_of_the_page_writes_html_or_names_another_host() -> None:
    folder = Path(__file__).parents[3] / "agent/elasticjob/cli/ui/page"
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"index.html", "page.js", "page.css"} <= files.keys()
    for name, text in files.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, name
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name
    assert "<style" not in files["index.html"]
    assert " style=" not in files["index.html"]
    assert files["index.html"].count("<script") == 1
