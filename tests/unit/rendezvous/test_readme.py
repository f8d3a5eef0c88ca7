"""The coordinator's README names files and functions that exist, and the design lists the rules in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticjob._runtime import rendezvous
from elasticjob._runtime.rendezvous.rounds.rounds import RULES
from support.common.story import functions_of, named_functions

RENDEZVOUS = Path(rendezvous.__path__[0])
DESIGN = Path(__file__).parents[3] / "docs/contribute/design/rounds.md"


@pytest.mark.parametrize(("file", "function"), named_functions(RENDEZVOUS))
def test_a_function_of_the_story_exists(file: str, function: str) -> None:
    assert function in functions_of((RENDEZVOUS / file).resolve())


def test_the_story_leads_through_every_room_of_the_decisions() -> None:
    rooms = {"event_handlers", "rounds", "observations", "standby_store.py", "store_recovery.py", "event_batch.py"}
    assert rooms <= {file.split("/", maxsplit=1)[0] for file, _ in named_functions(RENDEZVOUS)}
    assert len(named_functions(RENDEZVOUS)) > 30


def test_the_story_names_the_rules_in_their_modules() -> None:
    told = {function for _, function in named_functions(RENDEZVOUS)}
    assert {rule.__name__ for rule in RULES} - told == set()


def test_the_design_lists_the_rules_in_their_order() -> None:
    assert re.findall(r"^\d+\. `(\w+)`", DESIGN.read_text(), re.MULTILINE) == [rule.__name__ for rule in RULES]
