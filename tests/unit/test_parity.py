"""docs/parity.md names tests that exist, and every row names one."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = [line for line in (REPOSITORY / "docs/parity.md").read_text().splitlines() if line.startswith("| ")]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_row_has_what_it_is_about_where_it_is_and_a_test() -> None:
    assert [row for row in ROWS if row.count(" | ") != 2] == []
    headers = [row for row in ROWS if row.endswith("| test |")]
    assert [row for row in ROWS if not NAMED.search(row)] == headers


def test_the_tests_that_parity_names_exist() -> None:
    named = {match.groups() for row in ROWS for match in NAMED.finditer(row)}
    found = {path: (REPOSITORY / "tests" / path).read_text() for path, _ in named}
    assert [f"{path}::{name}" for path, name in sorted(named) if not re.search(rf"def {name}\(", found[path])] == []
