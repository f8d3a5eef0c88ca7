"""tests/TRACEABILITY.md names a test for each promise of docs/; the explorer's page names all of its faults."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
import tomllib

from support.rendezvous import rounds_invariants, rounds_world

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
NAMED = re.compile(r"`([\w/]+\.py)(?:::(test_\w+))?`")
SECTION = re.compile(r"## \[.*\]\(\.\./(.+)\)")
PROMISES = defaultdict(list)
"""The first cells of the rows of each page, in tests/TRACEABILITY.md."""
ROWS = []
for line in (TESTS / "TRACEABILITY.md").read_text().splitlines():
    if line.startswith("## "):
        section = SECTION.match(line)
    elif line.startswith("| ") and not line.endswith("| tests |"):
        ROWS.append(line)
        if section:
            PROMISES[section[1]].append(line.removeprefix("| ").split(" | ")[0])


def test_every_row_names_tests_that_exist() -> None:
    assert [row for row in ROWS if not NAMED.search(row.split(" | ")[-1])] == []
    named = {match.groups() for row in ROWS for match in NAMED.finditer(row.split(" | ")[-1])}
    found = {path: (TESTS / path).read_text() for path, _ in named}
    assert [
        f"{path}::{name}" for path, name in sorted(named, key=str) if name and f"def {name}(" not in found[path]
    ] == []
    assert len(named) > 400


def test_every_row_names_a_test_that_is_not_deep() -> None:
    """`make test` leaves out what is marked `deep`."""
    named = [[(path, name or "") for path, name in NAMED.findall(row.split(" | ")[-1])] for row in ROWS]
    deep = {(path, name) for path in {path for row in named for path, _ in row} for name in deep_tests(TESTS / path)}
    assert [row for row, tests in zip(ROWS, named, strict=True) if deep.issuperset(tests)] == []


def deep_tests(path: Path) -> set[str]:
    """Return the tests all of whose rows are deep, and "" if these are all tests of the file."""
    body = ast.parse(path.read_text()).body
    tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    marks = [node for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])]
    if any("mark.deep" in ast.unparse(mark.value) for mark in marks):
        return {"", *(test.name for test in tests)}
    return {test.name for test in tests if "pytest.mark.deep" in map(ast.unparse, test.decorator_list)}


def test_every_mark_is_declared() -> None:
    """pytest refuses the others only when it collects their files, which `make unit` does for two folders."""
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    declared = {re.split(r"[:(]", mark)[0] for mark in options["markers"]}
    declared |= {"asyncio", "filterwarnings", "parametrize", "skip", "skipif", "timeout", "usefixtures"}
    for conftest in TESTS.rglob("conftest.py"):
        declared |= set(re.findall(r'addinivalue_line\("markers", "(\w+)', conftest.read_text()))
    used = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        for mark in re.findall(r"\bpytest\.mark\.(\w+)", path.read_text()):
            used[mark].add(str(path.relative_to(TESTS)))
    assert {mark: files for mark, files in used.items() if mark not in declared} == {}
    assert {"alone", "deep"} <= used.keys()


@pytest.mark.parametrize("page", sorted(PROMISES))
def test_every_promise_of_a_page_has_a_test_and_every_tested_promise_is_on_its_page(page: str) -> None:
    tables = (REPOSITORY / page).read_text().split("\n\n")
    rows = [[line.removeprefix("| ").split(" | ")[0] for line in table.splitlines()[2:]] for table in tables]
    promised = [row for table in rows if set(table) & set(PROMISES[page]) for row in table]
    assert promised == PROMISES[page]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_pages_name_no_tests(page: Path) -> None:
    shown = re.sub(r"<!-- .*? -->", "", page.read_text())  # a mark of a block names its test
    assert re.findall(r"\w*test_\w+\.py|::test_\w+|`test_\w+`", shown) == []


def test_every_fault_and_invariant_of_the_explorer_is_documented() -> None:
    documented = set(re.findall(r"`([\w-]+)`", (REPOSITORY / "docs/contribute/explorer.md").read_text()))
    names = {*rounds_world.FAULTS, *(invariant.__name__ for invariant in rounds_invariants.INVARIANTS)}
    assert names - documented == set()
