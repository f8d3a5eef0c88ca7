"""Each row of the tables in docs/ names a test that exists; docs/explorer.md names all of the explorer's faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import rounds_invariants, rounds_world

REPOSITORY = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
TABLES = ("docs/parity.md", "docs/security.md", "docs/store-loss.md", "docs/explorer.md")


GENERATED = re.compile(r"<!-- (.+): begin -->.*<!-- \1: end -->", re.DOTALL)
"""Tables that a command writes."""


def rows(path: str) -> list[str]:
    text = GENERATED.sub("", (REPOSITORY / path).read_text())
    return [line for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("path", TABLES)
def test_every_row_has_three_columns_and_names_a_test(path: str) -> None:
    assert [row for row in rows(path) if row.count(" | ") != 2] == []
    headers = [row for row in rows(path) if row.endswith("| test |")]
    assert [row for row in rows(path) if not NAMED.search(row)] == headers


@pytest.mark.parametrize("path", TABLES)
def test_tests_named_in_a_table_exist(path: str) -> None:
    named = {match.groups() for row in rows(path) for match in NAMED.finditer(row)}
    found = {path: (REPOSITORY / "tests" / path).read_text() for path, _ in named}
    assert [f"{path}::{name}" for path, name in sorted(named) if not re.search(rf"def {name}\(", found[path])] == []


def test_every_fault_and_invariant_of_the_explorer_is_documented() -> None:
    documented = set(re.findall(r"`([\w-]+)`", (REPOSITORY / "docs/explorer.md").read_text()))
    names = {*rounds_world.FAULTS, *(invariant.__name__ for invariant in rounds_invariants.INVARIANTS)}
    assert names - documented == set()
