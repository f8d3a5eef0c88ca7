"""Nodes: what is kept of them, and which jobs an event concerns."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from elasticjob_operator.kube import NODES, Page
from elasticjob_operator.model.cluster.nodes import NodeWarning, parse_topology, parse_warning
from elasticjob_operator.model.cluster.notices import BUILT_IN, NoticeKeys, NoticeKind, NoticeSource
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.settings import parse_settings
from elasticjob_operator.watch import node_events as operator_node_events
from elasticjob_operator.watch.node_events import NodeEvents
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.build import raw_job, raw_pod
from support.operator.world import Api

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
    rows = {source: frozenset(row.written for row in BUILT_IN if row.source is source) for source in NoticeSource}
    drains = frozenset(row.key for row in BUILT_IN if row.kind is NoticeKind.DRAINS)
    known = NoticeKeys(
        rows[NoticeSource.TAINT], rows[NoticeSource.ANNOTATION], seconds,
        rows[NoticeSource.CONDITION], rows[NoticeSource.LABEL], drains,
    )  # fmt: skip
    assert parse_settings([], {}).notice_keys == known
    own = ["--notice-taints", "a/b, c", "--notice-annotations", ",", "--notice-seconds", "a/b=30, c=1"]
    own += ["--notice-conditions", "Hot=True", "--notice-labels", "our/end", "--notice-drains", "Hot,c"]
    assert parse_settings(own, {}).notice_keys == NoticeKeys(
        frozenset({"a/b", "c"}), frozenset(), {"a/b": 30, "c": 1},
        frozenset({"Hot=True"}), frozenset({"our/end"}), frozenset({"Hot", "c"}),
    )  # fmt: skip
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


# ---- events and lists


def node_events(cache: WatchCache, keys: NoticeKeys | None = KEYS, labels: tuple[str, ...] = ()) -> NodeEvents:
    return NodeEvents(cache, keys, labels, lambda: time.time())


async def list_nodes(events: NodeEvents, *nodes: Raw) -> None:
    """List these Nodes."""
    api = Api(NOW)
    for raw in nodes:
        api.put(NODES, raw)
    assert await events.list(api, None) == str(len(nodes))


def test_heartbeats_of_nodes_concern_no_job(cache: WatchCache, concerned: list[JobKey]) -> None:
    cache.set_nodes_watched(True)
    concerned.clear()
    events = node_events(cache)
    for version in range(1, 100):
        events.see(node("n2", version, unschedulable=True))
        events.see(node("n1", version))
    events.see(node("n4", 200, **SPOT))
    assert concerned == [("ns", "bert")]
    assert cache.warnings(["n1", "n2"]) == {"n2": NodeWarning(cordoned=True)}


def test_a_heartbeat_leaves_the_time_of_an_end_as_it_is(
    cache: WatchCache, concerned: list[JobKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.set_nodes_watched(True)
    concerned.clear()
    now = iter(range(1_750_000_000, 1_750_001_000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    events = node_events(cache, TIMED)
    for version in range(1, 50):
        events.see(node("n1", version, **SPOT))
    assert concerned == [("ns", "bert")]
    assert ends(cache.warnings(["n1"])["n1"]) == 120.0


async def test_nodes_count_as_watched_once_all_have_been_listed(cache: WatchCache, concerned: list[JobKey]) -> None:
    events = node_events(cache)
    events.see(node("n4"))
    assert (cache.nodes_watched, concerned) == (None, [])
    await list_nodes(events, node("n4"))
    assert (cache.nodes_watched, concerned) == (True, [("ns", "bert")])


async def test_nodes_that_a_list_lacks_are_forgotten(cache: WatchCache) -> None:
    events = node_events(cache, labels=LABELS)
    await list_nodes(events, node("n1", **SPOT), node("n2", zone="z"))
    events.see(node("n3", **SPOT))
    events.see(node("n3"), deleted=True)
    assert [*cache.warnings(["n1", "n3"])] == ["n1"]
    await list_nodes(events, node("n5", zone="z"))
    assert (cache.warnings(["n1"]), [*cache.topologies(["n2", "n5"])]) == ({}, ["n5"])


class PausedPages:
    """Lists two pages as they were at version 10, and calls `between` in between."""

    def __init__(self, first: list[Raw], second: list[Raw], between: Callable[[], None]) -> None:
        self._pages, self._between = (first, second), between

    async def pages(self, *_: object, **__: object) -> AsyncIterator[Page]:
        yield Page(self._pages[0], "10")
        self._between()
        yield Page(self._pages[1], "10")


async def test_what_the_watch_delivers_during_a_list_is_newer_than_its_later_pages(cache: WatchCache) -> None:
    events = node_events(cache)
    events.see(node("n1", 5, unschedulable=True))

    def watch() -> None:
        events.see(node("n2", 11, **SPOT))
        events.see(node("n5", 12, unschedulable=True))
        events.see(node("n4", 13), deleted=True)

    pages = PausedPages([node("n3", 6, **SPOT)], [node("n2", 7), node("n4", 8, **SPOT)], watch)
    for _ in range(2):
        assert await events.list(pages, None) == "10"
        assert [*cache.warnings(f"n{number}" for number in range(1, 6))] == ["n2", "n3", "n5"]
    await list_nodes(events, node("n2", 14))
    assert cache.warnings(["n2", "n3", "n5"]) == {}, "what was delivered during an earlier list counts no more"


async def test_a_node_that_fails_ends_no_list_and_is_logged_once(
    cache: WatchCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hostile(raw: Any, labels: Any) -> tuple[str, ...]:
        if raw["metadata"]["name"] == "n1":
            raise RuntimeError("boom")
        return parse_topology(raw, labels)

    monkeypatch.setattr(operator_node_events, "parse_topology", hostile)
    events = node_events(cache, labels=LABELS)
    for _ in range(2):
        await list_nodes(events, node("n1"), node("n2", zone="z"))
    assert [*cache.topologies(["n2"])] == ["n2"]
    assert [r.message for r in caplog.records] == ["cluster: Node n1 in a list cannot be taken over"]


async def test_warnings_are_dropped_when_the_permission_is_taken_away_and_come_back_with_it(
    cache: WatchCache, concerned: list[JobKey]
) -> None:
    events = node_events(cache)
    await list_nodes(events, node("n1", **SPOT))
    events.refuse()
    assert (cache.nodes_watched, cache.warnings(["n1"])) == (False, {})
    concerned.clear()
    await list_nodes(events, node("n1", **SPOT))
    assert (cache.nodes_watched, [*cache.warnings(["n1"])]) == (True, ["n1"])
    assert concerned


def test_a_node_that_cannot_be_read_is_logged_once_until_it_can_and_keeps_its_warning(
    cache: WatchCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hostile(raw: Any, *others: Any) -> NodeWarning | None:
        if "boom" in raw["metadata"]["annotations"]:
            raise RuntimeError("boom")
        return parse_warning(raw, *others)

    monkeypatch.setattr(operator_node_events, "parse_warning", hostile)
    events = node_events(cache)
    events.see(node("n1", unschedulable=True))
    for _ in range(2):
        for version in range(3):
            events.see(node("n1", version, {"boom": ""}))
        assert cache.warnings(["n1"]) == {"n1": NodeWarning(cordoned=True)}
        events.see(node("n1", 9, unschedulable=True))
    assert [record.message for record in caplog.records] == [
        "cluster: Node n1 cannot be read, and is ignored: RuntimeError: boom"
    ] * 2


# ---- the labels


async def test_labels_concern_all_jobs_once_and_then_those_with_pods_on_the_node(
    cache: WatchCache, concerned: list[JobKey]
) -> None:
    events = node_events(cache, labels=LABELS)
    await list_nodes(events, node("n1", zone="z"), node("n4", zone="z"))
    assert concerned == [("ns", "bert")]
    assert cache.topologies(["n1", "n4", "n5"]) == {"n1": ("z", ""), "n4": ("z", "")}
    concerned.clear()
    for name, zone in (("n1", "z"), ("n4", "z"), ("n1", "z"), ("n4", "y"), ("n1", "y")):
        events.see(node(name, 5, zone=zone))
    events.see(node("n4"), deleted=True)
    assert concerned == [("ns", "bert")]
    assert cache.topologies(["n1", "n4"]) == {"n1": ("y", "")}


def test_nodes_of_one_place_share_what_is_kept_of_it(cache: WatchCache) -> None:
    events = node_events(cache, labels=LABELS)
    for number in range(100):
        events.see(json.loads(json.dumps(node(f"n{number}", zone="z"))))
    kept = cache.topologies(f"n{number}" for number in range(100))
    assert len(kept) == 100
    assert len({id(topology) for topology in kept.values()}) == 1


@pytest.mark.parametrize("keys", [None, NoticeKeys(frozenset(), frozenset())])
async def test_without_warnings_no_cordon_counts(cache: WatchCache, keys: NoticeKeys | None) -> None:
    """A budget at the minimum is only for operators that see cordons: it would refuse every drain."""
    await list_nodes(node_events(cache, keys, LABELS), node("n1", zone="z", unschedulable=True))
    assert (cache.nodes_watched, [*cache.warnings(["n1"])]) == ((True, ["n1"]) if keys else (False, []))
    assert cache.topologies(["n1"]) == {"n1": ("z", "")}
