"""`elasticjob logs`: which lines of which pods, and what happens while it follows."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from elasticjob.cli.verbs.logs import log_streams, logs
from elasticjob.cli.verbs.logs.log_lines import LogChoice, PodLines
from elasticjob.cli.verbs.logs.logs import PodChoice, chosen_pods
from elasticjob.cli.views.style import Painter
from support.cli.fake_api import JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod, condition_of

from .conftest import Run

FORMED = "[agent] bert-0-0: round 1.0.{} formed: 2 pods, ranks 0-1 of 4 here"


def with_times(*lines: str) -> list[str]:
    return [f"2026-01-01T00:00:{second:02d}Z {line}" for second, line in enumerate(lines)]


@pytest.fixture
def two_pods(api: FakeApi) -> FakeApi:
    api.lists[JOBS] = [a_job()]
    api.lists[PODS] = [a_pod(0), a_pod(1), a_pod(0, role="store")]
    api.logs["bert-0-0"] = with_times(
        FORMED.format(1), "[default0]:a", "[default1]:b", FORMED.format(2), "[default0]:c"
    )
    api.logs["bert-1-0"] = with_times("[default2]:d", "[default3]:e")
    api.logs["bert-rdzv-0"] = with_times("store 0 serves")
    return api


def test_all_ranks_and_the_failed_pod_first(two_pods: FakeApi, run: Run) -> None:
    two_pods.lists[JOBS][0]["status"]["lastFailure"] = {"pod": "bert-1-0", "class": "UserError"}
    lines = run("logs", "bert").out.splitlines()
    assert lines[:4] == ["==> bert-1-0", "[default2]:d", "[default3]:e", "==> bert-0-0"]
    assert len(lines) == 9


def test_lines_by_rank_round_pod_and_tail(two_pods: FakeApi, run: Run) -> None:
    assert run("logs", "bert", "--rank", "0,3").out.splitlines() == [
        "==> bert-0-0", "[default0]:a", "[default0]:c", "==> bert-1-0", "[default3]:e",
    ]  # fmt: skip
    assert run("logs", "bert", "--rank", "0", "--tail", "1").out.splitlines()[-1] == "[default0]:c"
    assert run("logs", "bert", "--pod", "0", "--round", "1").out.splitlines() == [
        FORMED.format(1), "[default0]:a", "[default1]:b",
    ]  # fmt: skip
    assert run("logs", "bert", "--round", "1.0.2", "--rank", "0").out.splitlines()[-1] == "[default0]:c"
    assert run("logs", "bert", "--pod", "bert-1-0", "--tail", "1").out == "[default3]:e\n"
    assert run("logs", "bert", "--store", "--timestamps").out == "2026-01-01T00:00:00Z store 0 serves\n"


def test_one_log_that_cannot_be_read_does_not_hide_the_others(two_pods: FakeApi, run: Run) -> None:
    two_pods.refused = {f"{PODS}/bert-0-0/log": (500, "the kubelet does not answer")}
    shown = run("logs", "bert")
    assert (shown.code, "[default3]:e" in shown.out) == (1, True)
    assert "read the log of pod bert-0-0: the kubelet does not answer" in shown.err


def test_what_cannot_be_shown_is_said(two_pods: FakeApi, run: Run) -> None:
    assert "bert has no started pod 7" in run("logs", "bert", "--pod", "7").err
    assert "Kubernetes deletes a pod's log with the pod" in run("logs", "bert", "--previous").err
    two_pods.lists[JOBS][0]["status"]["lastFailure"] = {"pod": "bert-9-0", "class": "OOMKilled"}
    assert "pod bert-9-0 failed (OOMKilled) and its log is deleted" in run("logs", "bert").err
    two_pods.lists[JOBS][0]["status"]["lastFailure"]["class"] = "Preempted"
    assert run("logs", "bert").err == ""
    two_pods.lists[PODS] = []
    assert "no pod of bert has started: elasticjob why bert" in run("logs", "bert").err


def test_previous_pods_are_those_with_a_successor() -> None:
    pods = [a_pod(0), a_pod(1), a_pod(1, incarnation=1), a_pod(2, phase="Pending", containerStatuses=[])]
    names = [pod["metadata"]["name"] for pod in chosen_pods(pods, PodChoice(previous=True), "")]
    assert names == ["bert-1-0"]


def test_ranks_have_colours_on_a_terminal() -> None:
    lines = PodLines(LogChoice(), "", Painter(True))
    assert lines.shown_line("t", "[default0]:x") == "\x1b[36m[default0]:\x1b[0mx"
    assert lines.shown_line("t", "[agent] bert-0-0: y") == "\x1b[2m[agent] bert-0-0: y\x1b[0m"
    assert lines.shown_line("t", "plain") == "plain"


class EndingJob:
    """The pods of a job that is followed: a new pod comes, and the job ends once its log was asked for."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.asked: list[str] = []
        self._answer = api.answer
        self._lock = threading.Lock()
        self.broken: dict[str, int] = {}
        """How often the log of a pod breaks off."""

    def answer(self, method: str, url: str, body: Any) -> tuple[int, str]:
        with self._lock:
            path = url.partition("?")[0]
            if path.endswith("/log"):
                name = path.split("/")[-2]
                self.asked.append(url)
                if self.broken.get(name, 0) > 0:
                    self.broken[name] -= 1
                    return 500, '{"message": "the kubelet restarts"}'
                for pod in self.api.lists[PODS]:
                    if pod["metadata"]["name"] == name:
                        pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
                if name == "bert-2-0":
                    self.api.lists[JOBS][0]["status"]["conditions"] = [condition_of("Complete", "True", "")]
            return self._answer(method, url, body)


@pytest.fixture
def ending(two_pods: FakeApi, monkeypatch: pytest.MonkeyPatch) -> EndingJob:
    monkeypatch.setattr(logs, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(log_streams, "RETRY_SECONDS", 0.01)
    two_pods.watches[PODS] = [{"type": "ADDED", "object": a_pod(2)}]
    two_pods.logs["bert-2-0"] = with_times("[default4]:new")
    job = EndingJob(two_pods)
    two_pods.answer = job.answer  # type: ignore[method-assign]
    return job


def test_a_pod_that_comes_later_is_followed_until_the_job_ends(ending: EndingJob, run: Run) -> None:
    shown = run("logs", "bert", "-f")
    assert (shown.code, shown.err) == (0, "")
    assert {"[default0]:a", "[default3]:e", "[default4]:new"} <= set(shown.out.splitlines())
    assert all("tailLines=20" in url for url in ending.asked)


def test_a_stream_that_breaks_off_is_said_and_goes_on(ending: EndingJob, run: Run) -> None:
    ending.broken["bert-1-0"] = 2
    shown = run("logs", "bert", "-f", "--tail", "5")
    assert shown.code == 0
    assert shown.err.count("the log of pod bert-1-0 breaks off and goes on") == 2
    assert "[default3]:e" in shown.out


def test_an_unforeseen_exception_in_a_thread_is_said_and_ends_no_other_stream(
    ending: EndingJob, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elasticjob.cli.cluster.connection import Cluster

    read = Cluster.log_lines

    def fail(self: Cluster, pod: str, container: str, **options: Any) -> Any:
        if pod == "bert-0-0":
            raise ZeroDivisionError("a mistake of ours")
        return read(self, pod, container, **options)

    monkeypatch.setattr(Cluster, "log_lines", fail)
    shown = run("logs", "bert", "-f")
    assert shown.code == 1
    assert "the log of pod bert-0-0 is given up: ZeroDivisionError: a mistake of ours" in shown.err
    assert "[default4]:new" in shown.out
