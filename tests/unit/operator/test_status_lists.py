"""Status has lists and objects beside the texts of 0.1.0, and either is enough to read it back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.local.manifest.job_schema import find_mistakes
from elasticjob_operator.model.job.status import parse_status
from elasticjob_operator.model.job.status_lists import (
    MAX_INDICES,
    incarnation_ranges,
    index_ranges,
    outage_objects,
    read_incarnations,
    read_indices,
    round_object,
    without_lists,
)
from elasticjob_operator.model.observed import Observed
from support.operator.build import NOW, STATUS_SCHEMA, Raw, job, run, status, status_of

NODES = 4096
TEXTS = ("incarnations", "chargedRound", "chargedOutages", "uncountedOutages")
DECIDED = (
    "incarnations", "scaled_down", "charged_round", "charged_outages", "uncounted_outages", "last_round", "target",
)  # fmt: skip
OLD: Raw = {
    "incarnations": "0,0,2,0",
    "targetReplicas": 2,
    "scaledDown": {"replicas": 4, "indices": "1,3"},
    "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0, "standby": 1, "round": "1.0.7"},
    "rendezvousRound": 7,
    "chargedRound": "1.0.6",
    "chargedOutages": ["1.0.6", "start-3", "bert-0-1"],
    "uncountedOutages": ["1.0.2"],
    "goodput": {"productiveSeconds": 90, "lostSeconds": 10, "percent": 90, "round": "1.0.5"},
}
"""Fields as 0.1.0 writes them."""
R6 = {"executionAttempt": 1, "storeIncarnation": 0, "number": 6}
ROUNDS = st.builds(RoundId, st.integers(1, 9), st.integers(0, 9), st.integers(1, 10**12))
OUTAGES = st.lists(ROUNDS.map(str) | st.integers(0, 10**6).map("start-{}".format) | st.just("bert-0-1"), max_size=32)


def without_texts(raw: Raw) -> Raw:
    """Return a status as an operator will write it that writes no texts any more."""
    kept = {name: value for name, value in raw.items() if name not in TEXTS}
    for name, text_name in (("scaledDown", "indices"), ("rendezvous", "round"), ("goodput", "round")):
        if name in kept:
            kept[name] = {inner: value for inner, value in kept[name].items() if inner != text_name}
    return kept


def decided(raw: Raw) -> dict[str, Any]:
    read = parse_status(raw)
    return {name: getattr(read, name) for name in DECIDED}


def reconciled(raw: Raw) -> Raw:
    return status_of(run(suspended(raw)))


def suspended(raw: Raw) -> Observed:
    """Return a job that is suspended: a reconcile changes none of its indices."""
    known = status() | raw
    if "incarnations" not in raw:
        del known["incarnations"]
    return Observed(job=job(status=known, suspend=True, elasticPolicy={"minReplicas": 2, "maxReplicas": 4}))


def test_the_operator_writes_lists_beside_the_texts() -> None:
    written = reconciled(OLD)
    assert written["incarnationRanges"] == [
        {"first": 0, "last": 1, "incarnation": 0},
        {"first": 2, "last": 2, "incarnation": 2},
        {"first": 3, "last": 3, "incarnation": 0},
    ]
    assert (written["chargedRound"], written["lastChargedRound"]) == ("1.0.6", R6)
    assert written["chargedFailures"] == [
        {"type": "Round", "round": R6},
        {"type": "PodStart", "podStart": 3},
        {"type": "Pod", "pod": "bert-0-1"},
    ]
    assert written["uncountedFailures"] == [{"type": "Round", "round": R6 | {"number": 2}}]
    assert written["chargedOutages"] == OLD["chargedOutages"]


@pytest.mark.parametrize("texts", [True, False], ids=["of 0.1.0", "without texts"])
def test_an_operator_reads_either_and_writes_both(texts: bool) -> None:
    both = OLD | reconciled(OLD)
    both["scaledDown"] = OLD["scaledDown"] | {"indexRanges": index_ranges((1, 3))}
    both["rendezvous"] = OLD["rendezvous"] | {"lastRound": R6 | {"number": 7}}
    one = OLD if texts else without_texts(both)
    assert decided(one) == decided(OLD)
    assert reconciled(one).keys() >= {*TEXTS, "incarnationRanges", "lastChargedRound", "chargedFailures"}
    again = {name: reconciled(one)[name] for name in (*TEXTS, "rendezvous", "executionAttempts")}
    assert again == {name: reconciled(OLD)[name] for name in again}


def test_lists_are_never_the_only_reason_of_a_write() -> None:
    """An operator that takes over from 0.1.0 would otherwise write each job, those that ended long ago included."""
    written = reconciled(OLD)
    older = dict(without_lists(written))
    assert older != written
    assert run(suspended(older)).status is None
    changed = status_of(run(suspended(older | {"phase": "Running"})))
    assert changed["incarnationRanges"] == written["incarnationRanges"]


def test_the_text_holds_where_an_operator_of_0_1_0_has_left_an_old_list() -> None:
    """It keeps fields that it does not know, and so does the API server where the newer definition stays."""
    stale = reconciled(OLD)
    newer = {"incarnations": "1,0,2,0", "chargedRound": "1.0.9", "chargedOutages": [*OLD["chargedOutages"], "1.0.9"]}
    read = parse_status(stale | newer)
    assert (read.incarnations, read.charged_round) == ((1, 0, 2, 0), RoundId(1, 0, 9))
    assert read.charged_outages[-1] == "1.0.9"
    assert parse_status(stale | {"incarnations": ""}).incarnations == ()


@given(st.lists(st.integers(0, 3), max_size=40), st.frozensets(st.integers(0, 40)), ROUNDS, OUTAGES)
def test_what_is_written_as_lists_is_read_back(
    incarnations: list[int], indices: frozenset[int], last: RoundId, outages: list[str]
) -> None:
    raw = {
        "incarnationRanges": incarnation_ranges(incarnations),
        "scaledDown": {"replicas": 40, "indexRanges": index_ranges(indices)},
        "rendezvous": {"incarnation": 0, "lastRound": round_object(last)},
        "lastChargedRound": round_object(last),
        "chargedFailures": outage_objects(outages),
        "uncountedFailures": outage_objects(outages),
    }
    assert find_mistakes(STATUS_SCHEMA, raw) == []
    read = parse_status(raw)
    assert read.incarnations == tuple(incarnations)
    assert (read.scaled_down.indices if read.scaled_down else frozenset()) == indices
    assert read.last_round == read.charged_round == last
    assert read.charged_outages == read.uncounted_outages == tuple(outages)


@pytest.mark.parametrize(
    ("ranges", "read"),
    [
        ([{"first": 0, "last": 1, "incarnation": 2}, {"first": 3, "last": 3, "incarnation": 0}], (2, 2)),
        ([{"first": 1, "last": 1, "incarnation": 2}], ()),
        ([{"first": 0, "last": 10**15, "incarnation": 2}], ()),
        ([{"first": 0, "last": 0, "incarnation": -1}], ()),
        ([{"first": 0, "last": 0}], ()),
        ([{"first": 0, "last": "0", "incarnation": 0}, 7], ()),
        ("0-3", ()),
    ],
)
def test_ranges_that_no_operator_writes_end_the_list(ranges: Any, read: tuple[int, ...]) -> None:
    assert read_incarnations({"incarnationRanges": ranges}) == read
    huge = {"indexRanges": [{"first": 0, "last": 10**15}, {"first": 4, "last": 3}, {"first": 5, "last": 6}, None]}
    assert read_indices(huge) == {5, 6}
    odd = {"chargedFailures": [{"type": "Round", "round": {"number": 1}}, {}, 7, {"type": "Pod", "pod": 3}]}
    assert parse_status(odd).charged_outages == ()


@pytest.mark.parametrize(
    ("replaced", "lines", "size"),
    [(0, 3, 50), (40, 250, 4_000), (400, 2_400, 40_000), (NODES, 12_300, 250_000)],
)
def test_the_ranges_of_4096_nodes(replaced: int, lines: int, size: int) -> None:
    """Most nodes of a job that is not suspended have their first pod; each other one costs two ranges at most."""
    incarnations = [0] * NODES
    for index in random.Random(1).sample(range(NODES), replaced):
        incarnations[index] = 1 + index % 7
    ranges = incarnation_ranges(incarnations)
    assert read_incarnations({"incarnationRanges": ranges}) == tuple(incarnations)
    assert len(json.dumps(ranges, separators=(",", ":"))) <= size
    assert len(yaml.dump(ranges, default_flow_style=False).splitlines()) <= lines
    assert len(ranges) <= min(2 * replaced + 1, NODES)
    assert find_mistakes(STATUS_SCHEMA, {"incarnationRanges": ranges}) == []


def test_a_resumed_job_of_4096_nodes_has_one_range_and_a_lost_rack_one_more() -> None:
    known = status(incarnations=",".join(["3"] * NODES), targetReplicas=NODES, executionAttempts=4)
    written = status_of(run(Observed(job=job(status=known, replicas=NODES)), NOW))
    assert written["incarnationRanges"] == [{"first": 0, "last": NODES - 1, "incarnation": 4}]
    assert index_ranges(range(64, 128)) == [{"first": 64, "last": 127}]
    assert NODES + 64 < MAX_INDICES
