"""The mutants of tests/model/mutation still fit the source, and the runner reads the explorer's failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.mutation.__main__ import name_of_failure
from model.mutation.mutants import MUTANTS, REPOSITORY, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_changes_the_source_and_leaves_valid_python(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.path
    copy.parent.mkdir(parents=True)
    copy.write_text((REPOSITORY / mutant.path).read_text())
    mutant.apply(tmp_path)
    compile(copy.read_text(), mutant.path, "exec")


def test_a_mutant_whose_source_has_changed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"other: a\.py has 0 of"):
        Mutant("other", "a.py", "x = 2", "x = 3").apply(tmp_path)


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
