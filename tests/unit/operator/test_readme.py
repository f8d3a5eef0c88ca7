"""The story of a reconcile in the operator's README names files and functions that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import elasticjob_operator
from support.common.story import functions_of, named_functions

OPERATOR = Path(elasticjob_operator.__path__[0])


@pytest.mark.parametrize(("file", "function"), named_functions(OPERATOR))
def test_a_function_of_the_story_exists(file: str, function: str) -> None:
    assert function in functions_of(OPERATOR / file)


def test_the_story_leads_through_the_rooms_of_a_reconcile() -> None:
    rooms = {"links", "manifests", "observation", "plan", "queue", "reconcile", "watch"}
    assert rooms <= {file.split("/", maxsplit=1)[0] for file, _ in named_functions(OPERATOR)}
    assert len(named_functions(OPERATOR)) > 30
