"""The story of a round in the agent's README names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from elasticjob._runtime import agent

AGENT = Path(agent.__path__[0])
_SPAN = re.compile(r"`([\w./]+\.py)`|`([\w.]+)\(\)`")


def named_functions() -> list[tuple[str, str]]:
    """Return each function in the README with the file that is named before it."""
    found, file = [], ""
    for path, function in _SPAN.findall((AGENT / "README.md").read_text()):
        file = path or file
        if function:
            found.append((file, function))
    return found


def functions_of(path: Path) -> set[str]:
    """Return the names of a module's functions and methods, these with and without their class."""
    names = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, kinds):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, kinds)}
            names |= methods | {f"{node.name}.{name}" for name in methods}
    return names


@pytest.mark.parametrize(("file", "function"), named_functions())
def test_a_function_of_the_story_exists(file: str, function: str) -> None:
    assert function in functions_of((AGENT / file).resolve())


def test_the_story_leads_through_every_room_of_the_agent() -> None:
    rooms = {path.parent.name for path in AGENT.glob("*/__init__.py")}
    assert rooms - {"reporting"} <= {file.split("/", maxsplit=1)[0] for file, _ in named_functions()}
    assert len(named_functions()) > 30
