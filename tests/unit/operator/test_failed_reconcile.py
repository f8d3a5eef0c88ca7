"""A reconcile that raises an error is shown in its job, and does not stop another job."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract.names import Label
from elasticjob_operator.kube import EVENTS, JOBS, PODS, Conflict, KubeError, Refused, Throttled, Unclear
from elasticjob_operator.plan import plan
from elasticjob_operator.reconcile import controller as controller_module
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.failed_reconcile import (
    MAX_ERROR,
    REWRITE_SECONDS,
    failed_reconcile_of,
    shown_failure,
)
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.build import NOW, raw_job
from support.operator.world import Api, FakeStoreLinks, World

Raw = dict[str, Any]
BROKEN, OTHER = ("ns", "bert"), ("ns", "other")


class Cluster:
    """Two jobs and their controller, which the watch serves."""

    def __init__(self) -> None:
        self.api = Api(NOW)
        links: Any = FakeStoreLinks(self.api, World(self.api, {}).stores)
        self.recorder, self.enqueued = Recorder(self.api, "me"), list[Any]()
        self.watched = WatchCache(self.enqueued.append)
        self.controller = Controller(
            self.api, JobKeys(b"k" * 32), links, self.recorder, "image", clock=lambda: self.api.now,
            watched=self.watched,
        )  # fmt: skip
        for _, name in (BROKEN, OTHER):
            raw = raw_job()
            self.api.put(JOBS, {**raw, "metadata": {**raw["metadata"], "name": name, "uid": f"uid-of-{name}"}})
        self.deliver()

    def deliver(self) -> None:
        """Deliver the events of the watch."""
        for (resource, _), raw in self.api.objects.items():
            if resource is JOBS:
                self.watched.see_job(raw)

    def condition(self) -> Raw:
        found = [c for c in self.api.objects[JOBS, "bert"]["status"]["conditions"] if c["type"] == "ReconcileFailed"]
        assert len(found) == 1
        return dict(found[0])

    def pods(self, name: str) -> list[str]:
        objects = ((resource, raw["metadata"]) for (resource, _), raw in self.api.objects.items())
        return [m["name"] for r, m in objects if r is PODS and m["labels"][Label.JOB_NAME] == name]

    def writes(self) -> int:
        return self.api.calls.count(("update", "elasticjobs", "bert"))

    def break_plan(self, patch: pytest.MonkeyPatch, error: Exception) -> None:
        def planned(observed: Any, *arguments: Any) -> Any:
            if observed.job.name == "bert":
                raise error
            return plan(observed, *arguments)

        patch.setattr(controller_module, "plan", planned)


async def test_a_job_shows_that_its_reconcile_fails_until_one_succeeds_and_the_other_job_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    await cluster.controller.reconcile(BROKEN)
    phase = cluster.api.objects[JOBS, "bert"]["status"]["phase"]
    with monkeypatch.context() as patch:
        cluster.break_plan(patch, KeyError("no such\nround"))
        with pytest.raises(KeyError):
            await cluster.controller.reconcile(BROKEN)
        await cluster.controller.reconcile(OTHER)
        assert len(cluster.pods("other")) == 3
        shown = cluster.condition()
        assert (shown["status"], shown["reason"]) == ("True", "InternalError")
        assert "KeyError: 'no such\\nround' (test_failed_reconcile.py:" in shown["message"]
        assert cluster.api.objects[JOBS, "bert"]["status"]["phase"] == phase, "the rest of the status stays"
        writes, cluster.api.now = cluster.writes(), NOW + 60.0
        cluster.deliver()
        cluster.enqueued.clear()
        for _ in range(3):
            with pytest.raises(KeyError):
                await cluster.controller.reconcile(BROKEN)
        cluster.deliver()
        assert (cluster.writes(), cluster.enqueued) == (writes, []), "the same failure causes no further work"
    await cluster.recorder.flush()
    events = [raw for (resource, _), raw in cluster.api.objects.items() if resource is EVENTS]
    (event,) = [event for event in events if event["reason"] == "ReconcileFailed"]
    assert (event["type"], event["message"]) == ("Warning", shown["message"][:1000])
    await cluster.controller.reconcile(BROKEN)
    assert (cluster.condition()["status"], cluster.condition()["reason"]) == ("False", "Reconciled")
    assert cluster.condition()["lastTransitionTime"] > shown["lastTransitionTime"]
    writes = cluster.writes()
    await cluster.controller.reconcile(BROKEN)
    assert cluster.writes() == writes


async def test_a_failure_after_the_status_write_does_not_make_the_condition_alternate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()

    async def act(*_: object) -> None:
        raise RuntimeError("no manifest")

    shown = list[Raw]()
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "run_actions", act)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                await cluster.controller.reconcile(BROKEN)
            cluster.deliver()
            cluster.api.now += 1.0
            shown.append(cluster.condition())
        assert shown == [shown[0]] * 3
        assert shown[0]["status"] == "True"
    await cluster.controller.reconcile(BROKEN)
    assert cluster.condition()["status"] == "False"


async def test_a_failure_whose_message_differs_each_time_is_written_once_a_minute_and_enqueues_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    await cluster.controller.reconcile(BROKEN)
    cluster.deliver()
    cluster.enqueued.clear()
    writes, shown = cluster.writes(), list[str]()
    for second in range(180):
        cluster.api.now = NOW + second
        with monkeypatch.context() as patch:
            cluster.break_plan(patch, RuntimeError(f"no pod at {second} s"))
            with pytest.raises(RuntimeError):
                await cluster.controller.reconcile(BROKEN)
        cluster.deliver()
        shown.append(cluster.condition()["message"])
    assert cluster.writes() - writes == 180 / REWRITE_SECONDS
    assert cluster.enqueued == [], "the writes themselves must not end the delay before the retry"
    assert f"no pod at {2 * REWRITE_SECONDS:.0f} s" in shown[-1]
    with monkeypatch.context() as patch:
        cluster.break_plan(patch, Refused("pods is forbidden", 403))
        with pytest.raises(Refused):
            await cluster.controller.reconcile(BROKEN)
    assert cluster.condition()["reason"] == "RequestRefused", "another reason is shown at once"
    cluster.deliver()
    assert cluster.enqueued == []
    raw = cluster.api.objects[JOBS, "bert"]
    cluster.api.put(JOBS, {**raw, "spec": {**raw["spec"], "replicas": 3}})
    cluster.deliver()
    assert cluster.enqueued == [BROKEN], "a change of the spec may be the cure"


async def test_a_status_that_is_written_before_the_failure_does_not_enqueue_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()

    async def act(*_: object) -> None:
        raise RuntimeError("no manifest")

    monkeypatch.setattr(Controller, "run_actions", act)
    cluster.enqueued.clear()
    with pytest.raises(RuntimeError):
        await cluster.controller.reconcile(BROKEN)
    cluster.deliver()
    assert cluster.enqueued == []


async def test_the_error_itself_is_raised_where_it_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.break_plan(monkeypatch, KeyError("x"))

    async def refuse(*_: object) -> None:
        raise Refused("invalid", 422)

    monkeypatch.setattr(cluster.api, "update", refuse)
    with pytest.raises(KeyError):
        await cluster.controller.reconcile(BROKEN)


@pytest.mark.parametrize("error", [Unclear("x"), Throttled("x"), Conflict("x"), KubeError("x")])
def test_an_outage_of_the_api_server_is_no_failed_reconcile_of_a_job(error: Exception) -> None:
    assert failed_reconcile_of(error) is None


def test_what_is_shown_of_an_error_is_bounded() -> None:
    failure = failed_reconcile_of(Refused("x\x1b" + "y" * 5000, 403))
    assert failure is not None
    assert failure.reason == "RequestRefused"
    assert len(failure.message) < MAX_ERROR + 100
    assert failure.message.isprintable()
    assert shown_failure({"status": {"conditions": [{"type": "ReconcileFailed", "status": "False"}]}}) is None
