"""The watch on Nodes: what it keeps of them, which jobs an event concerns, and what ends it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from elasticjob_operator import node_watch
from elasticjob_operator.kube import NODES, Refused, Resource, Unclear
from elasticjob_operator.kube.client import KubeClient
from elasticjob_operator.kube.errors import error_from
from elasticjob_operator.model.nodes import NodeWarning, NoticeKeys, parse_topology, parse_warning
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.node_watch import watch_nodes
from elasticjob_operator.settings import NOTICE_ANNOTATION, NOTICE_TAINTS, parse_settings
from elasticjob_operator.watch_cache import WatchCache
from support.operator_build import raw_job, raw_pod

Raw = dict[str, Any]
KEYS = NoticeKeys(frozenset({"spot/notice", "scaled-down"}), frozenset({"our/notice"}))
NOW = 1_750_000_000.0
LABELS = ("zone", "example.com/rack")
SPOT: Raw = {"taints": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "spot/notice", "effect": "NoExecute"}]}


def node(name: str = "n1", version: int = 1, annotations: Raw | None = None, **spec: Any) -> Raw:
    """Return a Node as its kubelet writes it; `zone` is its label."""
    labels = {"zone": spec.pop("zone")} if "zone" in spec else {}
    meta: Raw = {"name": name, "resourceVersion": str(version), "annotations": annotations or {}, "labels": labels}
    return {"metadata": meta, "spec": spec, "status": {"conditions": [{"lastHeartbeatTime": str(version)}]}}


@pytest.mark.parametrize(
    ("raw", "warning"),
    [
        (node(), None),
        (node(taints=[{"key": "gpu"}], annotations={"other": "x"}), None),
        (node(unschedulable=True), NodeWarning(cordoned=True)),
        (node(**SPOT), NodeWarning("taint spot/notice")),
        (node(annotations={"our/notice": ""}, unschedulable=True), NodeWarning("annotation our/notice", cordoned=True)),
        (node(annotations={"our/notice": "soon"}, **SPOT), NodeWarning("taint spot/notice")),
        ({"metadata": {"annotations": None}, "spec": {"taints": "broken", "unschedulable": "yes"}}, None),
    ],
    ids=["none", "others", "cordoned", "a taint", "an annotation", "both", "not readable"],
)
def test_only_the_named_taints_and_annotations_and_a_cordon_are_warnings(raw: Raw, warning: NodeWarning | None) -> None:
    assert parse_warning(raw, KEYS, NOW) == warning


@pytest.mark.parametrize(
    ("labels", "topology"),
    [
        ({"zone": "z", "example.com/rack": "r", "other": "o"}, ("z", "r")),
        ({"example.com/rack": "r"}, ("", "r")),
        ({"zone": "z"}, ("z", "")),
        ({"other": "o"}, ()),
        (None, ()),
    ],
)
def test_the_topology_of_a_node_is_its_values_of_the_labels(labels: Any, topology: tuple[str, ...]) -> None:
    raw = {"metadata": {"name": "n", "labels": labels}}
    assert (parse_topology(raw, LABELS), parse_topology(raw, ())) == (topology, ())


@pytest.mark.parametrize(
    ("environment", "watches"),
    [
        ({}, True),
        ({"NODE_WARNINGS": "off"}, False),
        ({"NODE_WARNINGS": "off", "TOPOLOGY_LABELS": "zone, example.com/rack"}, True),
    ],
)
def test_nodes_are_watched_for_warnings_or_for_labels(environment: dict[str, str], watches: bool) -> None:
    assert parse_settings([], environment).watches_nodes is watches
    assert parse_settings(["--topology-labels", "zone,example.com/rack"], {}).topology_labels == LABELS


def test_the_flags_name_the_notices_and_switch_the_watch_off() -> None:
    seconds = {"aws-node-termination-handler/spot-itn": 120.0}
    known = NoticeKeys(frozenset(NOTICE_TAINTS), frozenset({NOTICE_ANNOTATION}), seconds)
    assert parse_settings([], {}).notice_keys == known
    own = ["--notice-taints", "a/b, c", "--notice-annotations", ",", "--notice-seconds", "a/b=30, c=1"]
    assert parse_settings(own, {}).notice_keys == NoticeKeys(frozenset({"a/b", "c"}), frozenset(), {"a/b": 30, "c": 1})
    none = parse_settings([], {"NOTICE_SECONDS": ","}).notice_keys
    assert none is not None
    assert none.taint_seconds == {}
    assert parse_settings([], {"NODE_WARNINGS": "off"}).notice_keys is None


@pytest.mark.parametrize("wrong", ["a/b", "a/b=", "=30", "a/b=0", "a/b=-1", "a/b=1.5", "a/b=86401", "a/b=²"])
def test_seconds_of_a_taint_that_are_none_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--notice-seconds", f"c=1,{wrong}"], {})
    assert f"{wrong!r} is not KEY=SECONDS" in capsys.readouterr().err


# ---- when the machine ends


def ends(warning: NodeWarning | None) -> float | None:
    """Return the seconds from NOW until the machine ends."""
    assert warning is not None
    return None if warning.ends_at is None else warning.ends_at - NOW


TIMED = NoticeKeys(KEYS.taints, frozenset({"our/notice", "their/notice"}), {"spot/notice": 120.0})


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2025-06-15T15:06:50Z", 10.0),
        ("2025-06-15T17:06:50.5+02:00", 10.5),
        ("1750000010", 10.0),
        ("1750000010.25", 10.25),
        ("2025-06-15T15:06:30Z", None),
        ("1749999999", None),
        ("2025-06-15T15:06:50", None),
        ("9" * 400, None),
        ("maintenance", None),
        ("true", None),
        ("30", None),
        ("", None),
        ("inf", None),
        (7, None),
    ],
)
def test_the_value_of_an_annotation_may_be_the_time_of_the_end(value: object, seconds: float | None) -> None:
    assert ends(parse_warning(node(annotations={"our/notice": value}), TIMED, NOW)) == seconds


@pytest.mark.parametrize(
    ("added", "seconds"),
    [
        (None, 120.0),
        ("2025-06-15T15:05:40Z", 60.0),
        ("2025-06-15T15:07:40Z", 120.0),
        ("2025-06-15T14:00:00Z", 120.0),
        ("soon", 120.0),
    ],
    ids=["not written", "a minute ago", "by a clock that is ahead", "over: the clock, or the taint is old", "no time"],
)
def test_a_taint_with_seconds_ends_the_machine_after_them(added: str | None, seconds: float) -> None:
    taint = {"key": "spot/notice", "effect": "NoSchedule"} | ({"timeAdded": added} if added else {})
    assert ends(parse_warning(node(taints=[taint]), TIMED, NOW)) == seconds
    assert ends(parse_warning(node(taints=[taint]), KEYS, NOW)) is None


def test_a_taint_counts_from_its_first_sighting_until_it_is_taken_away() -> None:
    first = parse_warning(node(**SPOT), TIMED, NOW)
    later = parse_warning(node(**SPOT, unschedulable=True), TIMED, NOW + 300, first)
    assert (ends(first), ends(later)) == (120.0, 120.0)
    gone = parse_warning(node(unschedulable=True), TIMED, NOW + 310, later)
    assert ends(gone) is None
    assert ends(parse_warning(node(**SPOT), TIMED, NOW + 320, gone)) == 440.0


def test_an_annotation_keeps_a_time_that_passes_and_takes_another_one() -> None:
    first = parse_warning(node(annotations={"our/notice": "1750000010"}), TIMED, NOW)
    assert ends(parse_warning(node(annotations={"our/notice": "1750000010"}), TIMED, NOW + 60, first)) == 10.0
    assert ends(parse_warning(node(annotations={"our/notice": "1750000090"}), TIMED, NOW + 60, first)) == 90.0
    assert ends(parse_warning(node(annotations={"our/notice": "1750000020"}), TIMED, NOW + 60, first)) is None


def test_the_earliest_end_counts() -> None:
    annotations = {"our/notice": "1750000200", "their/notice": "1750000100"}
    assert ends(parse_warning(node(annotations=annotations, **SPOT), TIMED, NOW)) == 100.0


# ---- the cache


@pytest.fixture
def concerned() -> list[JobKey]:
    """The jobs that events have concerned."""
    return []


@pytest.fixture
def cache(concerned: list[JobKey]) -> WatchCache:
    """A cache with the job `bert`, which has a pod on n1 and one that must not be on n3."""
    cache = WatchCache(concerned.append, nodes_watched=None)
    cache.see_job(raw_job())
    cache.see_pod(raw_pod(0, node="n1"))
    cache.see_pod(raw_pod(1, node="n2", avoids="n3"))
    concerned.clear()
    return cache


def test_a_warning_concerns_the_jobs_with_pods_that_are_there_or_must_not_be(
    cache: WatchCache, concerned: list[JobKey]
) -> None:
    for name, jobs in (("n1", 1), ("n2", 1), ("n3", 1), ("n4", 0)):
        concerned.clear()
        cache.see_node(name, NodeWarning("taint spot/notice"))
        assert len(concerned) == jobs, name
        cache.see_node(name, None)
        assert len(concerned) == 2 * jobs, name
    assert cache.warnings(["n1", "n2", "n3", "n4"]) == {}


# ---- the watch


class Nodes:
    """An API server whose watch on Nodes delivers one batch of events for each time it is opened, or an error."""

    def __init__(self, *batches: list[Raw] | Exception) -> None:
        self.batches = [*batches]
        self.versions: list[str] = []
        self.done = asyncio.Event()

    async def watch(self, resource: Resource, version: str) -> AsyncIterator[Raw]:
        assert resource is NODES
        self.versions.append(version)
        if not self.batches:
            self.done.set()
            await asyncio.Event().wait()
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        for event in batch:
            yield event


def event(raw: Raw, kind: str = "MODIFIED") -> Raw:
    return {"type": kind, "object": raw}


LISTED = event({"metadata": {"resourceVersion": "3"}}, "BOOKMARK")


async def run_watch(
    cache: WatchCache,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    keys: NoticeKeys | None = KEYS,
    labels: tuple[str, ...] = (),
) -> list[float]:
    """Watch until all batches are delivered; return the delays between them."""
    delays: list[float] = []
    sleep = asyncio.sleep

    async def skip(seconds: float) -> None:
        delays.append(seconds)
        await sleep(0)

    monkeypatch.setattr("elasticjob_operator.node_watch.asyncio.sleep", skip)
    watching = asyncio.create_task(watch_nodes(nodes, keys, cache, labels, lambda: time.time()))
    await asyncio.wait_for(nodes.done.wait(), 20.0)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return delays


async def test_heartbeats_of_nodes_concern_no_job(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.set_nodes_watched(True)
    concerned.clear()
    cordoned = [event(node("n2", version, unschedulable=True)) for version in range(1, 100)]
    heartbeats = [event(node("n1", version)) for version in range(100, 200)]
    nodes = Nodes([*cordoned, *heartbeats, event(node("n4", 200, **SPOT)), event({"metadata": {}}, "BOOKMARK")])
    await run_watch(cache, nodes, monkeypatch)
    assert concerned == [("ns", "bert")]
    assert cache.warnings(["n1", "n2"]) == {"n2": NodeWarning(cordoned=True)}


async def test_a_heartbeat_leaves_the_time_of_an_end_as_it_is(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.set_nodes_watched(True)
    concerned.clear()
    now = iter(range(1_750_000_000, 1_750_001_000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    await run_watch(cache, Nodes([event(node("n1", version, **SPOT)) for version in range(1, 50)]), monkeypatch, TIMED)
    assert concerned == [("ns", "bert")]
    assert ends(cache.warnings(["n1"])["n1"]) == 120.0


async def test_the_watch_goes_on_where_it_ended_and_begins_anew_where_events_are_gone(
    cache: WatchCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(
        [event(node("n1", 7, **SPOT), "ADDED"), event({"metadata": {"resourceVersion": "9"}}, "BOOKMARK")],
        [event({"code": 410, "message": "too old"}, "ERROR")],
        [event(node("n1", 12, **SPOT), "DELETED")],
        error_from(410, {}, "watch nodes"),
        [event(node("n2", 20, unschedulable=True), "ADDED")],
    )
    await run_watch(cache, nodes, monkeypatch)
    assert cache.nodes_watched
    assert nodes.versions == ["", "9", "", "12", "", "20"]
    assert cache.warnings(["n1", "n2"]) == {"n2": NodeWarning(cordoned=True)}


async def test_nodes_count_as_watched_once_all_have_been_delivered(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_watch(cache, Nodes([event(node("n4"), "ADDED")]), monkeypatch)
    assert (cache.nodes_watched, concerned) == (None, [])
    await run_watch(cache, Nodes([event(node("n4"), "ADDED"), LISTED]), monkeypatch)
    assert (cache.nodes_watched, concerned) == (True, [("ns", "bert")])


async def test_an_operator_without_the_permission_says_so_once_and_goes_on(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = Refused("watch nodes: nodes is forbidden", 403)
    delays = await run_watch(cache, Nodes(refused, refused, refused), monkeypatch)
    assert delays == [node_watch.REFUSED_RETRY_SECONDS] * 3
    assert len([r for r in caplog.records if "nodes is forbidden" in r.message]) == 1
    assert (cache.nodes_watched, concerned) == (False, [("ns", "bert")])


async def test_warnings_are_dropped_when_the_permission_is_taken_away(
    cache: WatchCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes([event(node("n1", **SPOT), "ADDED"), LISTED], Refused("forbidden", 403))
    await run_watch(cache, nodes, monkeypatch)
    assert (cache.nodes_watched, cache.warnings(["n1"])) == (False, {})


async def test_a_permission_that_comes_later_is_used(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(Refused("forbidden", 403), [event(node("n1", **SPOT), "ADDED"), LISTED])
    await run_watch(cache, nodes, monkeypatch)
    assert (cache.nodes_watched, [*cache.warnings(["n1"])]) == (True, ["n1"])


async def test_an_api_server_that_does_not_answer_changes_nothing(
    cache: WatchCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Unclear("watch nodes: no response")
    busy = Refused("watch nodes: too many requests", 429)
    nodes = Nodes([event(node("n1", 2, **SPOT), "ADDED"), LISTED], down, down, busy)
    delays = await run_watch(cache, nodes, monkeypatch)
    assert delays == [1.0, 1.0, 2.0, 4.0]
    assert nodes.versions == ["", "3", "3", "3", "3"]
    assert (cache.nodes_watched, [*cache.warnings(["n1"])]) == (True, ["n1"])


# ---- the labels


async def test_labels_concern_all_jobs_once_and_then_those_with_pods_on_the_node(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [event(node("n1", zone="z"), "ADDED"), event(node("n4", zone="z"), "ADDED"), LISTED]
    await run_watch(cache, Nodes(first), monkeypatch, labels=LABELS)
    assert concerned == [("ns", "bert")]
    assert cache.topologies(["n1", "n4", "n5"]) == {"n1": ("z", ""), "n4": ("z", "")}
    concerned.clear()
    heartbeats = [event(node(name, 4, zone="z")) for name in ("n1", "n4", "n1")]
    moved = [event(node("n4", 5, zone="y")), event(node("n1", 5, zone="y"))]
    await run_watch(cache, Nodes([*heartbeats, *moved, event(node("n4"), "DELETED")]), monkeypatch, labels=LABELS)
    assert concerned == [("ns", "bert")]
    assert cache.topologies(["n1", "n4"]) == {"n1": ("y", "")}


async def test_nodes_of_one_place_share_what_is_kept_of_it(cache: WatchCache, monkeypatch: pytest.MonkeyPatch) -> None:
    added = [event(json.loads(json.dumps(node(f"n{number}", zone="z"))), "ADDED") for number in range(100)]
    await run_watch(cache, Nodes(added), monkeypatch, labels=LABELS)
    kept = cache.topologies(f"n{number}" for number in range(100))
    assert len(kept) == 100
    assert len({id(topology) for topology in kept.values()}) == 1


@pytest.mark.parametrize("keys", [None, NoticeKeys(frozenset(), frozenset())])
async def test_without_warnings_no_cordon_counts(
    cache: WatchCache, monkeypatch: pytest.MonkeyPatch, keys: NoticeKeys | None
) -> None:
    """A budget at the minimum is only for operators that see cordons: it would refuse every drain."""
    nodes = Nodes([event(node("n1", zone="z", unschedulable=True), "ADDED"), LISTED])
    await run_watch(cache, nodes, monkeypatch, keys, LABELS)
    assert (cache.nodes_watched, [*cache.warnings(["n1"])]) == ((True, ["n1"]) if keys else (False, []))
    assert cache.topologies(["n1"]) == {"n1": ("z", "")}


# ---- the request


async def test_a_watch_lists_first_then_yields_one_event_a_line_and_its_errors_are_those_of_requests() -> None:
    requests: list[dict[str, str]] = []
    large = node("n2", 2, annotations={"images": "x" * 300_000})

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.path == "/api/v1/nodes"
        requests.append(dict(request.query))
        if len(requests) == 1:
            return web.json_response({"metadata": {"resourceVersion": "3"}, "items": [node("n0")]})
        if len(requests) > 2:
            return web.json_response({"message": "nodes is forbidden"}, status=403)
        stream = web.StreamResponse()
        await stream.prepare(request)
        for raw in (node("n1"), large):
            await stream.write(json.dumps(event(raw)).encode() + b"\n")
        return stream

    app = web.Application()
    app.router.add_get("/{tail:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api = KubeClient(client.ApiClient(client.Configuration(host=host)), None)
    try:
        listed = [event(node("n0"), "ADDED"), LISTED]
        assert [e async for e in api.watch(NODES, "")] == [*listed, event(node("n1")), event(large)]
        with pytest.raises(Refused, match="nodes is forbidden"):
            await anext(api.watch(NODES, "7"))
    finally:
        await api.close()
        await runner.cleanup()
    assert [query.get("resourceVersion") for query in requests] == [None, "3", "7"]
    assert [query.get("allowWatchBookmarks") for query in requests] == [None, "true", "true"]


async def test_an_api_server_without_a_response_is_unclear() -> None:
    api = KubeClient(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), None)
    with pytest.raises(Unclear, match="watch nodes"):
        await anext(api.watch(NODES, "7"))
    await api.close()
