"""The operator's process while the API server does not answer: it stops its work, stays alive, and leads again."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from elasticjob._runtime.system.daemon_threads import DaemonExecutor
from elasticjob_operator import __main__ as operator_main
from elasticjob_operator import lease
from elasticjob_operator.__main__ import CRD_NAME, NEWEST_STATUS_FIELD, CannotStart, Operator, check_crd, run
from elasticjob_operator.kube import CRDS, LEASES, Refused, Resource, Unclear
from elasticjob_operator.lease import Election
from elasticjob_operator.loop_thread import LoopThread
from elasticjob_operator.model.cluster.raw import moment
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.settings import OperatorSettings
from elasticjob_operator.watch.watch_cache import WatchCache
from elasticjob_operator.watch.watches import Watches
from support.operator.world import Api


class Process:
    """An operator without probes, whose API server may hang, and whose watch does nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = api_with_crd()
        self.changes: asyncio.Queue[str] = asyncio.Queue()
        """Starts and ends of the watch, each with the generation of the Lease."""
        self.watch_failed = asyncio.Event()
        self.deadline = 0.2
        """Of the leader, in seconds."""
        self.hanging = False
        self.on_renewal: Callable[[], None] = lambda: None
        """Called in the thread of the leader election at each write of the Lease."""
        self.stop = asyncio.Event()
        settings = OperatorSettings(image="i", namespace="ns", identity="me", health_port=0)
        self.lease_thread = LoopThread("lease")
        self.operator = Operator(settings, self.api, self.api, self.api, self.lease_thread, self.stop)
        self.elections: list[Election] = []
        make = self.operator.new_election
        monkeypatch.setattr(self.operator, "new_election", lambda term: self._quick(make(term)))
        monkeypatch.setattr(lease, "RENEW_EVERY", 0.05)
        monkeypatch.setattr(Watches, "run", self._watch)
        for call in ("get", "update"):
            monkeypatch.setattr(self.api, call, self._hanging(getattr(self.api, call)))

    def _quick(self, election: Election) -> Election:
        election.deadline = self.deadline
        self.elections.append(election)
        return election

    def _hanging(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def request(*args: Any, **more: Any) -> Any:
            if self.hanging:
                await asyncio.sleep(0.05)
                raise Unclear("no answer within 0.05 s")
            answer = await call(*args, **more)
            if call.__name__ == "update":
                self.on_renewal()
            return answer

        return request

    async def _watch(self, *_: Any) -> None:
        generation = self.elections[-1].generation
        self.changes.put_nowait(f"start {generation}")
        try:
            await self.watch_failed.wait()
            raise RuntimeError("an error in the code of a watch")
        finally:
            self.changes.put_nowait(f"end {generation}")

    async def change(self) -> str:
        """Return the next start or end of the watch; wait 20 s at most."""
        return await asyncio.wait_for(self.changes.get(), 20.0)

    def holder(self) -> str:
        return str(self._lease()["holderIdentity"])

    def renewed(self) -> float:
        """Return when the Lease was last renewed, Unix seconds."""
        return moment(self._lease(), "renewTime") or 0.0

    def _lease(self) -> Any:
        return self.api.objects[LEASES, "elasticjob-operator"]["spec"]


@pytest.fixture
async def process(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Process]:
    made = Process(monkeypatch)
    yield made
    await made.lease_thread.close()


def api_with_crd() -> Any:
    """Return an API server with what the operator also reads of its client."""
    api: Any = Api(0.0)
    setattr(api, "last_success", 0.0)  # noqa: B010  # no attribute of `Api`
    api.put(CRDS, crd(NEWEST_STATUS_FIELD))
    return api


def crd(*status_fields: str) -> dict[str, Any]:
    status: dict[str, Any] = {"properties": {name: {} for name in status_fields}}
    version = {"schema": {"openAPIV3Schema": {"properties": {"status": status}}}}
    return {"metadata": {"name": CRD_NAME}, "spec": {"versions": [version]}}


@pytest.mark.slow
async def test_an_operator_that_loses_its_lease_stops_work_and_leads_again(process: Process) -> None:
    running = asyncio.create_task(process.operator.run())
    assert await process.change() == "start 1"
    assert REGISTRY.get_sample_value("elasticjob_leader") == 1
    process.hanging = True
    assert await process.change() == "end 1"
    assert not running.done(), "the process ended"
    process.hanging = False
    assert await process.change() == "start 2"
    process.stop.set()
    await asyncio.wait_for(running, 20.0)
    assert (await process.change(), process.holder()) == ("end 2", "")
    assert REGISTRY.get_sample_value("elasticjob_leader") == 0


@pytest.mark.slow
async def test_a_busy_event_loop_does_not_cost_the_lease(process: Process) -> None:
    """The loop does not turn until the Lease has been renewed for twice as long as a leader may do without."""
    process.deadline = 1.0
    running = asyncio.create_task(process.operator.run())
    assert await process.change() == "start 1"
    began, renewed = process.renewed(), threading.Event()
    process.on_renewal = lambda: renewed.set() if process.renewed() >= began + 2 * process.deadline else None
    assert renewed.wait(20.0), "a busy loop delays the renewals"
    process.stop.set()
    await asyncio.wait_for(running, 20.0)
    assert await process.change() == "end 1", "the operator lost its Lease"


@pytest.mark.slow
async def test_an_event_loop_that_hangs_costs_the_lease(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate may lead although the process of the leader lives on. The leader stops its work once its loop turns
    again."""
    monkeypatch.setattr(lease, "LONGEST_SILENCE", 0.3)
    ended = threading.Event()
    renew = Election.renew

    async def renew_until_lost(election: Election) -> None:
        try:
            await renew(election)
        finally:
            ended.set()

    monkeypatch.setattr(Election, "renew", renew_until_lost)
    running = asyncio.create_task(process.operator.run())
    assert await process.change() == "start 1"
    assert ended.wait(20.0), "the Lease is renewed for ever"
    assert [await process.change(), await process.change()] == ["end 1", "start 2"]
    process.stop.set()
    await asyncio.wait_for(running, 20.0)


async def test_a_new_leader_lists_before_it_reconciles_and_watches(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciled: asyncio.Queue[JobKey] = asyncio.Queue()
    listing, may_list = asyncio.Event(), asyncio.Event()

    async def list_resource(cache: WatchCache, resource: Resource, *_: Any) -> str:
        cache.on_event(("ns", resource.plural))
        listing.set()
        await may_list.wait()
        return "1"

    async def reconcile(_: Controller, key: JobKey) -> float:
        reconciled.put_nowait(key)
        return 300.0

    monkeypatch.setattr(WatchCache, "list_resource", list_resource)
    monkeypatch.setattr(Controller, "reconcile", reconcile)
    running = asyncio.create_task(process.operator.run())
    await asyncio.wait_for(listing.wait(), 20.0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (process.changes.empty(), reconciled.empty()) == (True, True), "the list has not ended"
    may_list.set()
    assert await process.change() == "start 1"
    assert await asyncio.wait_for(reconciled.get(), 20.0) == ("ns", "pods")
    assert REGISTRY.get_sample_value("elasticjob_queue_depth") == 0, "jobs that are due later count"
    process.stop.set()
    await asyncio.wait_for(running, 20.0)


async def test_the_metrics_count_jobs_that_wait(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_resource(cache: WatchCache, *_: Any) -> str:
        for number in range(100):
            cache.on_event(("ns", f"job-{number}"))
        return "1"

    async def hang(*_: Any) -> float:
        await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(WatchCache, "list_resource", list_resource)
    monkeypatch.setattr(Controller, "reconcile", hang)
    running = asyncio.create_task(process.operator.run())
    assert await process.change() == "start 1"
    assert (REGISTRY.get_sample_value("elasticjob_queue_depth") or 0) > 50
    process.stop.set()
    await asyncio.wait_for(running, 20.0)


async def test_the_cache_is_compared_with_the_api_server_from_time_to_time(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: asyncio.Queue[None] = asyncio.Queue()

    async def compare(_: Watches) -> None:
        compared.put_nowait(None)

    monkeypatch.setattr(Watches, "compare", compare)
    process.operator.settings = replace(process.operator.settings, resync_seconds=0.01)
    running = asyncio.create_task(process.operator.run())
    for _ in range(2):
        await asyncio.wait_for(compared.get(), 20.0)
    process.stop.set()
    await asyncio.wait_for(running, 20.0)


async def test_an_error_in_a_watch_ends_the_operator_at_once_and_releases_the_lease(process: Process) -> None:
    """Also while a call in a thread hangs. The pod is restarted, or the other operator leads."""
    hang = threading.Event()
    asyncio.get_running_loop().set_default_executor(DaemonExecutor())
    call = asyncio.get_running_loop().run_in_executor(None, hang.wait, 60.0)
    process.watch_failed.set()
    try:
        with pytest.raises(RuntimeError, match="an error in the code of a watch"):
            await asyncio.wait_for(process.operator.run(), 20.0)
        assert process.holder() == ""
    finally:
        hang.set()
        await call


async def test_a_starting_operator_waits_for_an_api_server_that_does_not_answer(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_main, "FIRST_API_RETRY", 0.01)
    process.hanging = True
    checking = asyncio.create_task(check_crd(process.api))
    done, _ = await asyncio.wait({checking}, timeout=0.3)
    assert not done
    process.hanging = False
    await asyncio.wait_for(checking, 20.0)


async def test_a_starting_operator_without_permission_or_crd_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = Api(0.0)
    with pytest.raises(CannotStart, match="is not installed"):
        await check_crd(api)

    api.put(CRDS, crd("phase", "conditions"))
    with pytest.raises(CannotStart, match=r"is older than this operator: apply crds/elasticjobs\.yaml"):
        await check_crd(api)

    async def refuse(*_: Any) -> Any:
        raise Refused("forbidden", 403)

    monkeypatch.setattr(api, "get", refuse)
    with pytest.raises(CannotStart, match="forbidden"):
        await check_crd(api)


async def test_the_operator_may_open_as_many_files_as_its_container_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Container runtimes set a soft limit of 1024: the links to the stores of 512 jobs, with their standby stores.
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1] - 1), before[1]))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    try:
        with pytest.raises(CannotStart, match="finds no cluster"):
            await run(OperatorSettings(image="i", namespace="ns", identity="me"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_lease_that_is_acquired_during_a_stop_is_released(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, acquired = Election.acquire, asyncio.Event()
    loop = asyncio.get_running_loop()

    async def acquire_and_wait(election: Election) -> None:
        await acquire(election)
        loop.call_soon_threadsafe(acquired.set)
        await asyncio.sleep(60.0)

    monkeypatch.setattr(Election, "acquire", acquire_and_wait)
    running = asyncio.create_task(process.operator.run())
    await asyncio.wait_for(acquired.wait(), 20.0)
    process.stop.set()
    await asyncio.wait_for(running, 20.0)
    assert process.holder() == ""
