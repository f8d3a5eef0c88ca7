"""Watches: each is listed, followed and retried for ever by itself; readiness and metrics say which works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import prometheus_client
import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from elasticjob_operator.kube import JOBS, NODES, PODS, KubeError, NotFound, Page, Refused, Resource, Unclear
from elasticjob_operator.kube import client as kube_client
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.kube.client import KubeClient
from elasticjob_operator.kube.errors import error_from
from elasticjob_operator.model.cluster.notices import NoticeKeys
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.watch import handlers, watches
from elasticjob_operator.watch.node_events import NodeEvents
from elasticjob_operator.watch.watch_cache import WatchCache
from elasticjob_operator.watch.watches import MAX_WATCH_FAILURE, Watches
from support.operator.build import UID, raw_job, raw_pod

Raw = dict[str, Any]
Batch = list[Raw] | Exception
FORBIDDEN = Refused("watch pods: pods is forbidden", 403)
GONE = error_from(410, {}, "watch pods")


def event(raw: Raw, kind: str = "MODIFIED") -> Raw:
    return {"type": kind, "object": raw}


def bookmark(version: int) -> Raw:
    return event({"metadata": {"resourceVersion": str(version)}}, "BOOKMARK")


def pod(index: int) -> Raw:
    """Return a pod that the job `bert` owns."""
    raw = raw_pod(index)
    raw["metadata"]["ownerReferences"] = [{"kind": "ElasticJob", "uid": UID, "controller": True}]
    return raw


class Server:
    """An API server whose watches deliver one batch of events each time they are opened, or an error, and then hang."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Resource, str | None], list[Raw]] = {}
        self.lists: dict[tuple[Resource, str | None], list[Exception]] = {}
        """Errors of the next lists."""
        self.batches: dict[tuple[Resource, str | None], list[Batch]] = {}
        self.opened: list[tuple[str, str | None, str]] = []
        """Plural, namespace and resourceVersion of each watch; "list" for a list."""
        self.idle: dict[tuple[Resource, str | None], asyncio.Event] = {}
        """Set once a watch has nothing left to deliver."""
        self.before_watch: dict[tuple[Resource, str], asyncio.Event] = {}
        """What a watch from this version on awaits before it delivers anything; `waiting` is set then."""
        self.waiting = asyncio.Event()

    async def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        self.opened.append((resource.plural, namespace, "list"))
        if errors := self.lists.get((resource, namespace)):
            raise errors.pop(0)
        yield Page(self.objects.get((resource, namespace), []), "3")

    @asynccontextmanager
    async def watch(
        self, resource: Resource, namespace: str | None, version: str, selector: str = ""
    ) -> AsyncIterator[AsyncIterator[Raw]]:
        self.opened.append((resource.plural, namespace, version))
        batches = self.batches.get((resource, namespace), [])
        batch = batches.pop(0) if batches else None
        if isinstance(batch, Exception):
            raise batch
        if before := self.before_watch.get((resource, version)):
            self.waiting.set()
            await before.wait()
            batch = []
        yield self._events(batch, self.idle_of(resource, namespace))

    def idle_of(self, resource: Resource, namespace: str | None) -> asyncio.Event:
        return self.idle.setdefault((resource, namespace), asyncio.Event())

    async def _events(self, batch: list[Raw] | None, idle: asyncio.Event) -> AsyncIterator[Raw]:
        if batch is None:
            idle.set()
            await asyncio.Event().wait()
        for found in batch or ():
            yield found


class Clock:
    """A clock that `asyncio.sleep` of the watches advances; the sleeps are in `delays`, without jitter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.delays: list[float] = []
        self._sleep = asyncio.sleep
        monkeypatch.setattr(watches.asyncio, "sleep", self._skip)  # type: ignore[attr-defined]
        monkeypatch.setattr(watches.random, "uniform", lambda *_: 1.0)  # type: ignore[attr-defined]

    def __call__(self) -> float:
        return self.now

    async def _skip(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.now += seconds
        await self._sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def concerned() -> list[JobKey]:
    """The jobs that events have concerned."""
    return []


@pytest.fixture
def cache(concerned: list[JobKey]) -> WatchCache:
    return WatchCache(concerned.append)


def watch_all(
    server: Server, cache: WatchCache, clock: Clock, *namespaces: str, nodes: NodeEvents | None = None
) -> Watches:
    watched = handlers.watched(handlers.event_registry(cache, nodes), cache, nodes)
    return Watches(server, watched, namespaces, clock)


async def run_until_idle(made: Watches, server: Server, *of: tuple[Resource, str | None]) -> None:
    """List, and watch until these watches have nothing left to deliver."""
    await made.list_first()
    running = asyncio.create_task(made.run())
    try:
        for resource, namespace in of:
            idle = asyncio.create_task(server.idle_of(resource, namespace).wait())
            done, _ = await asyncio.wait({idle, running}, timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
            assert idle in done, f"{resource.plural} in {namespace}: {running}"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def versions(server: Server, resource: Resource, namespace: str | None) -> list[str]:
    """Return what a watch asked for, in order: its resourceVersions, and "list" for a list."""
    return [version for plural, where, version in server.opened if (plural, where) == (resource.plural, namespace)]


# ---- the handlers


def test_the_handlers_say_what_is_watched(cache: WatchCache) -> None:
    cache.kueue = True
    nodes = NodeEvents(cache, None)
    found = handlers.watched(handlers.event_registry(cache, nodes), cache, nodes)
    label = "elasticjob.dev/job-name"
    assert [(w.resource, w.selector, w.needed) for w in found] == [
        (PODS, label, True), (JOBS, "", True), (KUEUE_WORKLOADS, label, True), (NODES, "", False),
    ]  # fmt: skip


async def test_lists_and_events_reach_the_cache(server: Server, cache: WatchCache, clock: Clock) -> None:
    first = pod(0)
    server.objects = {(JOBS, None): [raw_job()], (PODS, None): [first]}
    server.batches[PODS, None] = [[event(pod(1), "ADDED"), event(first, "DELETED")]]
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None), (JOBS, None))
    assert cache.job(("ns", "bert")) is not None
    assert [found.name for _, found in cache.pods(UID)] == ["bert-1-0"]
    assert cache.is_listed("ns")
    assert clock.delays == []


async def test_an_event_whose_handler_fails_ends_no_watch(
    server: Server, cache: WatchCache, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(raw: Raw, _deleted: bool = False) -> None:
        if raw["metadata"]["name"] == "bert-0-0":
            raise RuntimeError("boom")
        seen.append(raw["metadata"]["name"])

    seen: list[str] = []
    monkeypatch.setattr(cache, "see_pod", fail)
    server.batches[PODS, None] = [[event(pod(0)), event(pod(1))]]
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None))
    assert seen == ["bert-1-0"]
    assert "an event of bert-0-0 fails" in caplog.text


# ---- where a watch goes on


async def test_a_watch_goes_on_where_it_ended_and_lists_again_where_events_are_gone(
    server: Server, cache: WatchCache, clock: Clock
) -> None:
    gone = event({"code": 410, "message": "too old"}, "ERROR")
    server.batches[PODS, None] = [[bookmark(7), bookmark(9)], [gone], [bookmark(12)], GONE, [bookmark(20)]]
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None))
    assert versions(server, PODS, None) == ["list", "3", "9", "list", "3", "12", "list", "3", "20"]
    assert clock.delays == []


async def test_versions_that_are_gone_again_and_again_are_no_busy_loop(
    server: Server, cache: WatchCache, clock: Clock
) -> None:
    server.batches[PODS, None] = [GONE] * 5
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None))
    assert clock.delays == [1.0, 2.0, 4.0, 8.0]


async def test_objects_that_are_gone_after_a_pause_are_dropped(
    server: Server, cache: WatchCache, clock: Clock, concerned: list[JobKey]
) -> None:
    server.objects[JOBS, None] = [raw_job()]
    server.batches[JOBS, None] = [NotFound("watch elasticjobs: 404 page not found", 404)]
    made = watch_all(server, cache, clock)
    await made.list_first()
    server.objects[JOBS, None] = []
    concerned.clear()
    await run_until_idle_again(made, server, (JOBS, None))
    assert (cache.job(("ns", "bert")), concerned) == (None, [("ns", "bert")])


async def run_until_idle_again(made: Watches, server: Server, of: tuple[Resource, str | None]) -> None:
    running = asyncio.create_task(made.run())
    await asyncio.wait_for(server.idle_of(*of).wait(), 20.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (Unclear("no response"), ["3", "3"]),
        (error_from(429, {}, "watch pods"), ["3", "3"]),
        (error_from(503, {}, "watch pods"), ["3", "list", "3"]),
        (FORBIDDEN, ["list", "3", "list", "3"]),
        (NotFound("404 page not found", 404), ["list", "3", "list", "3"]),
        (KubeError("an event cannot be read", 413), ["list", "3", "list", "3"]),
    ],
    ids=["no response", "busy", "server error", "forbidden", "not found", "too large"],
)
async def test_a_failed_watch_is_retried_after_a_growing_delay(
    server: Server, cache: WatchCache, clock: Clock, error: KubeError, then: list[str]
) -> None:
    server.batches[PODS, None] = [error, error]
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None))
    assert versions(server, PODS, None) == ["list", "3", *then]
    assert clock.delays == [1.0, 2.0]


async def test_a_watch_is_retried_for_ever_and_says_so_once(
    server: Server, cache: WatchCache, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server.batches[PODS, None] = [*[FORBIDDEN] * 100, [bookmark(9)], FORBIDDEN]
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None))
    assert clock.delays[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert clock.delays[99:] == [60.0, 1.0]
    lines = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        "the watch on pods in all namespaces fails and is tried again until it works",
        f"the watch on pods in all namespaces works again after {sum(clock.delays[:100]):.0f} s",
        "the watch on pods in all namespaces fails and is tried again until it works",
        "the watch on pods in all namespaces works again after 1 s",
    ]


async def test_watches_that_end_at_once_or_by_an_error_are_no_busy_loop(
    server: Server, cache: WatchCache, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    error = event({"code": 500, "message": "etcd has no leader"}, "ERROR")
    server.batches[PODS, None] = [[], [error], [], [bookmark(9)]]
    await run_until_idle(watch_all(server, cache, clock), server, (PODS, None))
    assert clock.delays == [1.0, 2.0, 4.0]
    assert len([record for record in caplog.records if "works again" in record.message]) == 1


async def test_a_watch_without_events_works_once_it_has_lasted(
    server: Server, cache: WatchCache, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bookmarks come once a minute, and not from each API server."""
    monkeypatch.setattr(watches, "SHORT_WATCH_SECONDS", 0.05)
    server.batches[PODS, None] = [[], []]
    made = watch_all(server, cache, clock)
    await made.list_first()
    works = asyncio.Event()
    monkeypatch.setattr(watches.log, "warning", lambda line, *_: works.set() if "works again" in line else None)
    running = asyncio.create_task(made.run())
    await asyncio.wait_for(works.wait(), 20.0)
    assert clock.delays == [1.0, 2.0]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# ---- each namespace on its own


async def test_a_namespace_that_fails_delays_no_other_one(server: Server, cache: WatchCache, clock: Clock) -> None:
    server.lists[PODS, "a"] = [FORBIDDEN] * 10**6
    server.lists[JOBS, "a"] = [FORBIDDEN] * 10**6
    server.objects = {(JOBS, "ns"): [raw_job()]}
    server.batches[PODS, "ns"] = [[event(pod(0), "ADDED")]]
    made = watch_all(server, cache, clock, "a", "ns")
    await run_until_idle(made, server, (PODS, "ns"), (JOBS, "ns"))
    assert len(cache.pods(UID)) == 1
    assert (cache.is_listed("ns"), cache.is_listed("a")) == (True, False)
    await made.compare()
    assert [where for plural, where, what in server.opened if (plural, what) == ("pods", "list")][-1] == "ns"


async def test_no_job_waits_for_a_list_of_workloads_that_hangs(
    server: Server, cache: WatchCache, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kueue's webhook may be down, while its definitions exist."""

    async def hang(_: Any, resource: Resource, *__: Any) -> str:
        if resource == KUEUE_WORKLOADS:
            await asyncio.Event().wait()
        return "3"

    monkeypatch.setattr(watches, "FIRST_LIST_SECONDS", 0.05)
    monkeypatch.setattr(WatchCache, "list_resource", hang)
    cache.kueue = True
    await asyncio.wait_for(watch_all(server, cache, clock).list_first(), 20.0)
    assert "list workloads: no answer within 0.05 s" in caplog.text


async def test_all_lists_of_workloads_that_hang_have_one_deadline(
    server: Server, cache: WatchCache, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new leader waits for it once, and not once for each namespace; and it lists Nodes meanwhile."""
    waits: list[float | None] = []

    async def hang(_: Any, resource: Resource, *__: Any) -> str:
        if resource == KUEUE_WORKLOADS:
            await asyncio.Event().wait()
        return "3"

    async def wait(tasks: Any, *, timeout: float | None = None, real: Any = asyncio.wait) -> Any:
        waits.append(timeout)
        return await real(tasks, timeout=timeout)

    monkeypatch.setattr(watches, "FIRST_LIST_SECONDS", 0.05)
    monkeypatch.setattr(WatchCache, "list_resource", hang)
    cache.kueue, cache.nodes_watched = True, None
    nodes = NodeEvents(cache, NoticeKeys(frozenset(), frozenset()))
    made = watch_all(server, cache, clock, *(f"ns-{number}" for number in range(20)), nodes=nodes)
    monkeypatch.setattr(watches.asyncio, "wait", wait)  # type: ignore[attr-defined]
    await asyncio.wait_for(made.list_first(), 20.0)
    assert [seconds for seconds in waits if seconds is not None] == [0.05]
    assert cache.nodes_watched is True
    assert len([record for record in caplog.records if "no answer within 0.05 s" in record.message]) == 20


async def test_a_list_beside_the_watches_goes_on_after_one_that_fails(
    server: Server, cache: WatchCache, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    made = watch_all(server, cache, clock, "a", "b")
    await made.list_first()
    server.lists[PODS, "a"] = [Unclear("no response")]
    server.objects[JOBS, "b"] = [raw_job()]
    await made.compare()
    assert "in namespace a failed, and is tried again later: no response" in caplog.text
    assert cache.job(("ns", "bert")) is not None


async def test_a_watch_goes_on_from_a_list_of_a_restored_etcd(
    server: Server, cache: WatchCache, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A watch from a version that is still to come would deliver nothing."""
    proceed = asyncio.Event()
    server.batches[PODS, None] = [[bookmark(1000)]]
    made = watch_all(server, cache, clock)
    await made.list_first()
    server.before_watch[PODS, "1000"] = proceed
    running = asyncio.create_task(made.run())
    await asyncio.wait_for(server.waiting.wait(), 20.0)
    await made.compare()
    proceed.set()
    await asyncio.wait_for(server.idle_of(PODS, None).wait(), 20.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert versions(server, PODS, None) == ["list", "3", "1000", "list", "3"]
    assert "goes on from version 3, which is below 1000: was etcd restored?" in caplog.text


async def test_lists_of_all_namespaces_go_on_after_one_that_fails(server: Server, cache: WatchCache) -> None:
    server.lists[PODS, "a"] = [FORBIDDEN]
    server.objects[JOBS, "b"] = [raw_job()]
    await cache.list_again(server, ("a", "b"))
    assert cache.job(("ns", "bert")) is not None
    assert (cache.is_listed("a"), cache.is_listed("b")) == (False, True)


# ---- what is said of them


def sample(name: str, resource: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, {"resource": resource})


async def test_readiness_is_about_what_fails_in_all_namespaces_and_the_metrics_about_any(
    server: Server, cache: WatchCache, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.lists[PODS, "a"] = [FORBIDDEN]
    made = watch_all(server, cache, clock, "a", "b")
    await made.list_first()
    never = asyncio.Event()
    monkeypatch.setattr(watches.Watch, "run", lambda _: never.wait())
    running = asyncio.create_task(made.run())
    await asyncio.wait({running}, timeout=0.01)
    clock.now += MAX_WATCH_FAILURE + 1
    assert sample("elasticjob_failing_watches", "pods") == 1.0
    assert sample("elasticjob_failing_watches", "elasticjobs") == 0.0
    assert sample("elasticjob_watch_age_seconds", "pods") == MAX_WATCH_FAILURE + 1
    assert made.describe_blindness() == "", "one tenant's namespace"
    server.lists[PODS, "b"] = [FORBIDDEN]
    await made.list_first()
    clock.now += MAX_WATCH_FAILURE + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert "the watch on pods in namespace " in made.describe_blindness()
    assert made.describe_blindness().endswith("pods is forbidden")
    assert sample("elasticjob_watch_age_seconds", "pods") is None, "this operator leads no more"


async def test_nodes_are_not_needed(server: Server, cache: WatchCache, clock: Clock) -> None:
    server.lists[NODES, None] = [FORBIDDEN]
    made = watch_all(server, cache, clock, "a", nodes=NodeEvents(cache, NoticeKeys(frozenset(), frozenset())))
    await made.list_first()
    clock.now += MAX_WATCH_FAILURE + 1
    assert made.describe_blindness() == ""
    assert cache.nodes_watched is False


async def test_a_refusal_of_a_short_time_keeps_the_warnings_of_nodes(
    server: Server, cache: WatchCache, clock: Clock
) -> None:
    """An API server that starts refuses for some seconds what its roles permit."""
    known: list[tuple[bool | None, int]] = []

    raw = {"metadata": {"name": "n1", "resourceVersion": "2"}, "spec": {"unschedulable": True}}
    cache.nodes_watched = None
    record = cache.set_nodes_watched

    def note(watched: bool) -> None:
        record(watched)
        known.append((watched, len(cache.warnings(["n1"]))))

    cache.set_nodes_watched = note  # type: ignore[method-assign]
    nodes = NodeEvents(cache, NoticeKeys(frozenset(), frozenset()))
    made = watch_all(server, cache, clock, nodes=nodes)
    server.objects[NODES, None] = [raw]
    await made.list_first()
    server.batches[NODES, None] = [FORBIDDEN]
    server.lists[NODES, None] = [FORBIDDEN] * 3
    await run_until_idle_again(made, server, (NODES, None))
    assert known == [(True, 1)] * 2
    assert sum(clock.delays) < MAX_WATCH_FAILURE
    server.idle.clear()
    server.batches[NODES, None] = [FORBIDDEN]
    server.lists[NODES, None] = [FORBIDDEN] * 7
    await run_until_idle_again(made, server, (NODES, None))
    assert (known[2], known[-1]) == ((False, 0), (True, 1))


async def test_an_error_in_the_code_of_one_watch_ends_all(server: Server, cache: WatchCache, clock: Clock) -> None:
    server.batches[PODS, "a"] = [RuntimeError("boom")]
    made = watch_all(server, cache, clock, "a", "b")
    await made.list_first()
    with pytest.raises(RuntimeError, match="boom"):
        await asyncio.wait_for(made.run(), 20.0)


# ---- the request


@asynccontextmanager
async def serving(handle: Any) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_get("/{tail:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = kubernetes_client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    configuration.connection_pool_maxsize = 2
    api = KubeClient(kubernetes_client.ApiClient(configuration), None, attempts=1)
    try:
        yield api
    finally:
        await api.close()
        await runner.cleanup()


async def test_a_watch_yields_one_event_a_line_and_its_errors_are_those_of_requests() -> None:
    requests: list[dict[str, str]] = []
    large = pod(0) | {"spec": {"images": "<" * 3_000_000}}

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.path == "/api/v1/namespaces/a/pods"
        requests.append(dict(request.query))
        if len(requests) > 1:
            return web.json_response({"message": "pods is forbidden"}, status=403)
        stream = web.StreamResponse()
        await stream.prepare(request)
        for raw in (pod(1), large):
            line = json.dumps(event(raw)).replace("<", r"\u003c")  # as the encoder of the API server writes it
            await stream.write(line.encode() + b"\n")
        await stream.write(b'{"type": "MODI')  # the connection ends within an event
        return stream

    async with serving(handle) as api:
        async with api.watch(PODS, "a", "3", "job") as events:
            assert [e async for e in events] == [event(pod(1)), event(large)]
        with pytest.raises(Refused, match="watch pods: pods is forbidden"):
            async with api.watch(PODS, "a", "4", "job"):
                pass
    seconds = [int(request.pop("timeoutSeconds")) for request in requests]
    assert all(kube_client.WATCH_SECONDS // 2 <= found <= kube_client.WATCH_SECONDS for found in seconds)
    common = {"watch": "true", "allowWatchBookmarks": "true", "labelSelector": "job"}
    assert requests == [common | {"resourceVersion": "3"}, common | {"resourceVersion": "4"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [b'"' + b"x" * 40_000_000 + b'"\n', b"[1]\n", b"<html>\n", b"[" * 100_000 + b"\n"],
    ids=["too large", "no object", "no JSON", "too deep"],
)  # fmt: skip
async def test_an_event_that_cannot_be_read_is_an_error(line: bytes) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(line)
        return stream

    async with serving(handle) as api, api.watch(PODS, None, "3") as events:
        with pytest.raises(KubeError, match="an event cannot be read") as caught:
            assert [e async for e in events]
    assert caught.value.status == 413


async def test_a_watch_that_is_silent_for_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall may forget a connection: then neither data nor an end of the connection arrives."""
    monkeypatch.setattr(kube_client, "SILENT_WATCH_SECONDS", 0.2)
    silent = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(json.dumps(bookmark(9)).encode() + b"\n")
        await silent.wait()
        return stream

    async with serving(handle) as api:
        async with api.watch(PODS, None, "3") as events:
            assert [e async for e in events] == [bookmark(9)]
        silent.set()


async def test_watches_take_no_connections_from_other_requests() -> None:
    ended = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"name": "n"}})
        stream = web.StreamResponse()
        await stream.prepare(request)
        await ended.wait()
        return stream

    async with serving(handle) as api:
        opened = [api.watch(PODS, f"ns-{number}", "3") for number in range(5)]
        for one in opened:
            await asyncio.wait_for(one.__aenter__(), 20.0)
        assert await asyncio.wait_for(api.get(NODES, None, "n"), 20.0)
        ended.set()
        for one in opened:
            await one.__aexit__(None, None, None)
