"""The table of notices by which a Node announces its end or asks for a drain: code, chart and page."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from elasticjob_operator.model.cluster.nodes import NodeWarning, parse_warning
from elasticjob_operator.model.cluster.notices import (
    BUILT_IN,
    BUILT_IN_DRAINS,
    BUILT_IN_SECONDS,
    Notice,
    NoticeKeys,
    NoticeKind,
    NoticeSource,
    built_in,
)
from elasticjob_operator.settings import parse_settings
from support.operator.build import REPOSITORY

Raw = dict[str, Any]
NOW = 1_750_000_000.0


def node_with(row: Notice) -> Raw:
    """Return a Node that has this notice."""
    match row.source:
        case NoticeSource.TAINT:
            return {"spec": {"taints": [{"key": row.key, "effect": "NoSchedule"}]}}
        case NoticeSource.ANNOTATION:
            return {"metadata": {"annotations": {row.key: "x"}}}
        case NoticeSource.CONDITION:
            return {"status": {"conditions": [{"type": row.key, "status": row.value}]}}
        case NoticeSource.LABEL:
            return {"metadata": {"labels": {row.key: row.value}}}


@pytest.mark.parametrize("row", BUILT_IN, ids=lambda row: row.written)
def test_each_row_of_the_table_is_known_by_default(row: Notice) -> None:
    keys = parse_settings([], {}).notice_keys
    assert keys is not None
    warning = parse_warning(node_with(row), keys, NOW)
    assert warning is not None
    found = warning.notice if row.kind is NoticeKind.ENDS else warning.drain
    name = f"{row.source.value} {row.written}"
    assert (found, bool(warning.notice and warning.drain)) == (name, False)
    none = NoticeKeys(frozenset(), frozenset())
    assert parse_warning(node_with(row), none, NOW) is None


@pytest.mark.parametrize(
    "node",
    [
        {"status": {"conditions": [{"type": "KernelDeadlock", "status": "False"}]}},
        {"status": {"conditions": [{"type": "KernelDeadlock", "status": "Unknown"}]}},
        {"metadata": {"labels": {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}}},
        {"metadata": {"labels": {"cloud.google.com/scheduled-maintenance-time": "1900000000"}}},
        {"spec": {"taints": [{"key": "DeletionCandidateOfClusterAutoscaler", "effect": "PreferNoSchedule"}]}},
    ],
)
def test_a_node_that_is_well_has_no_notice(node: Raw) -> None:
    keys = parse_settings([], {}).notice_keys
    assert keys is not None
    assert parse_warning(node, keys, NOW) is None


def test_an_end_counts_more_than_a_drain_and_a_label_may_say_when() -> None:
    keys = NoticeKeys(
        frozenset({"a", "b"}), frozenset(), {}, frozenset({"Hot"}), frozenset({"end"}), frozenset({"b", "Hot"})
    )
    node = {
        "metadata": {"labels": {"end": str(int(NOW) + 60)}},
        "spec": {"taints": [{"key": "b"}]},
        "status": {"conditions": [{"type": "Hot", "status": "True"}]},
    }
    label = f"label end={int(NOW) + 60}"
    assert parse_warning(node, keys, NOW) == NodeWarning(label, ends=((label, NOW + 60),))
    del node["metadata"]
    assert parse_warning(node, keys, NOW) == NodeWarning(drain="taint b")


def test_the_page_and_the_chart_have_the_table() -> None:
    page = (REPOSITORY / "docs/operate/drains-and-spot.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `([^`]+)` \| (Ends|Drains) \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(row.source.value, row.written, row.kind.value, row.by) for row in BUILT_IN]
    values = yaml.safe_load((REPOSITORY / "charts/elasticjob/values.yaml").read_text())["nodeWarnings"]
    for source, name in zip(NoticeSource, ("taints", "annotations", "conditions", "labels"), strict=True):
        assert tuple(values[name]) == built_in(source)
    assert (tuple(values["drains"]), values["taintSeconds"]) == (BUILT_IN_DRAINS, BUILT_IN_SECONDS)
