"""The operator's process while the API server does not answer: it stops its work, stays alive, and leads again."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elasticjob_operator import __main__ as operator_main
from elasticjob_operator import handlers, lease
from elasticjob_operator.__main__ import CRD_NAME, NEWEST_STATUS_FIELD, CannotStart, Operator, check_crd, run
from elasticjob_operator.kube import CRDS, LEASES, Refused, Unclear
from elasticjob_operator.lease import Election
from elasticjob_operator.settings import OperatorSettings
from elasticjob_operator.watch_cache import WatchCache
from support.operator_world import Api


class Process:
    """An operator without probes, whose API server may hang, and whose watch does nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = api_with_crd()
        self.changes: asyncio.Queue[str] = asyncio.Queue()
        """Starts and ends of the watch, each with the generation of the Lease."""
        self.watch_failed = asyncio.Event()
        self.hanging = False
        self.stop = asyncio.Event()
        settings = OperatorSettings(image="i", namespace="ns", identity="me", health_port=0)
        self.operator = Operator(settings, self.api, self.api, self.api, self.stop)
        self.elections: list[Election] = []
        make = self.operator._election
        monkeypatch.setattr(self.operator, "_election", lambda term: self._quick(make(term)))
        monkeypatch.setattr(lease, "RENEW_EVERY", 0.05)
        monkeypatch.setattr(handlers, "watch_events", self._watch)
        for call in ("get", "update"):
            monkeypatch.setattr(self.api, call, self._hanging(getattr(self.api, call)))

    def _quick(self, election: Election) -> Election:
        election.deadline = 0.2
        self.elections.append(election)
        return election

    def _hanging(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def request(*args: Any, **more: Any) -> Any:
            if self.hanging:
                await asyncio.sleep(0.05)
                raise Unclear("no answer within 0.05 s")
            return await call(*args, **more)

        return request

    async def _watch(self, *_: Any) -> None:
        generation = self.elections[-1].generation
        self.changes.put_nowait(f"start {generation}")
        try:
            await self.watch_failed.wait()
            raise handlers.WatchEnded("the watch ended")
        finally:
            self.changes.put_nowait(f"end {generation}")

    async def change(self) -> str:
        """Return the next start or end of the watch; wait 20 s at most."""
        return await asyncio.wait_for(self.changes.get(), 20.0)

    def holder(self) -> str:
        return str(self.api.objects[LEASES, "elasticjob-operator"]["spec"]["holderIdentity"])


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


async def test_an_operator_that_loses_its_lease_stops_work_and_leads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    running = asyncio.create_task(process.operator.run())
    assert await process.change() == "start 1"
    process.hanging = True
    assert await process.change() == "end 1"
    assert not running.done(), "the process ended"
    process.hanging = False
    assert await process.change() == "start 2"
    process.stop.set()
    await asyncio.wait_for(running, 20.0)
    assert (await process.change(), process.holder()) == ("end 2", "")


async def test_a_new_leader_lists_before_it_watches_and_soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf lists all objects too: both at once would keep the operator from renewing its Lease."""
    process = Process(monkeypatch)
    lists: asyncio.Queue[bool] = asyncio.Queue()
    may_list = asyncio.Event()

    async def list_again(*_: Any) -> None:
        lists.put_nowait(process.changes.empty())
        await may_list.wait()

    monkeypatch.setattr(operator_main, "FIRST_LIST_SECONDS", 0.0)
    monkeypatch.setattr(WatchCache, "list_again", list_again)
    running = asyncio.create_task(process.operator.run())
    assert await asyncio.wait_for(lists.get(), 20.0), "the watch began before the list"
    for _ in range(10):
        await asyncio.sleep(0)
    assert (process.changes.empty(), lists.empty()) == (True, True), "the list has not ended"
    may_list.set()
    assert await process.change() == "start 1"
    await asyncio.wait_for(lists.get(), 20.0)
    process.stop.set()
    await asyncio.wait_for(running, 20.0)


async def test_the_lease_is_released_where_the_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.watch_failed.set()
    with pytest.raises(handlers.WatchEnded):
        await asyncio.wait_for(process.operator.run(), 20.0)
    assert process.holder() == ""


async def test_a_starting_operator_waits_for_an_api_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_main, "FIRST_API_RETRY", 0.01)
    process = Process(monkeypatch)
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
