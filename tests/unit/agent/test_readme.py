"""The story of a round in the agent's README names files and functions that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob._runtime import agent
from support.common.story import functions_of, named_functions

AGENT = Path(agent.__path__[0])


@pytest.mark.parametrize(("file", "function"), named_functions(AGENT))
def test_a_function_of_the_story_exists(file: str, function: str) -> None:
    assert function in functions_of((AGENT / file).resolve())


def test_the_story_leads_through_every_room_of_the_agent() -> None:
    rooms = {path.parent.name for path in AGENT.glob("*/__init__.py")}
    assert rooms - {"reporting"} <= {file.split("/", maxsplit=1)[0] for file, _ in named_functions(AGENT)}
    assert len(named_functions(AGENT)) > 30
