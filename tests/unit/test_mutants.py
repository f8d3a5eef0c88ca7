"""The mutants of tests/model/mutation still fit the source, and the runner reads the explorer's failures."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from model.mutation.__main__ import name_of_failure
from model.mutation.mutants import CONTRACT, MUTANTS, REPOSITORY, Mutant
from model.mutation.source_match import find_code, replace_code


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_changes_the_source_and_leaves_valid_python(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.path
    copy.parent.mkdir(parents=True)
    mutant.apply(tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != ast.dump(ast.parse((REPOSITORY / mutant.path).read_text()))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("a+b", ["first", "second"]),
        ("first(a, b=1)", ["third"]),
        ("if a:\n    return 1", ["second"]),
        ("case 1: return a", ["third"]),
        ("a + b + 1", []),
        ("1.0", []),
    ],
)
def test_code_is_found_by_its_syntax_tree(tmp_path: Path, code: str, found: list[str]) -> None:
    (tmp_path / "one.py").write_text("def first(a, b):\n    return (a +\n            b)  # a sum\n")
    (tmp_path / "room").mkdir()
    (tmp_path / "room/two.py").write_text(
        "def second(a, b):\n    if a: return 1\n    return a + b\n\n"
        "def third(a):\n    match first(a, b=1):\n        case 1:\n            return a\n"
    )
    assert [match.function for match in find_code(tmp_path, code)] == found
    assert [match.function for match in find_code(tmp_path, code, "second")] == [n for n in found if n == "second"]


@pytest.mark.parametrize(
    ("code", "new", "text"),
    [("a + b", "a", "def f(a, b):\n    return a"), ("return a + b", "", "def f(a, b):\n    pass")],
)
def test_code_is_replaced(tmp_path: Path, code: str, new: str, text: str) -> None:
    (tmp_path / "a.py").write_text("def f(a, b):\n    return a + b\n")
    (match,) = find_code(tmp_path, code)
    assert replace_code(match, new) == text
    assert find_code(tmp_path, code) == [match], "the tree is as before"


def test_a_mutant_whose_source_has_changed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"other: agent/elasticjob/_runtime/contract has 0 of"):
        Mutant("other", CONTRACT, "no_such_name + 1", "1").apply(tmp_path)


def test_there_are_enough_mutants_and_each_has_its_own_name() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 30


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("E       AssertionError: ('up', 1): no_rank_twice\nFAILED t.py::test_x[1]", "`no_rank_twice`"),
        ("E   assert not \"budgets_are_exact: ('fail', 0)\"", "`budgets_are_exact`"),
        ("E   AssertionError: after 4000 moves without a fault: outcome None", "`liveness_violation`"),
        ("E   AssertionError: seed 3: the operator still writes\nFAILED t.py::test_random_runs[0]",
         "AssertionError: seed 3: the operator still writes (`test_random_runs`)"),
    ],
)  # fmt: skip
def test_a_failure_is_named_by_its_invariant(output: str, name: str) -> None:
    assert name_of_failure(output) == name
