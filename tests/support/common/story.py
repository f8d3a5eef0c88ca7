"""Functions that a README names in backquotes, each after the file that has it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_SPAN = re.compile(r"`([\w./]+\.py)`|`([\w.]+)\(\)`")


def named_functions(folder: Path) -> list[tuple[str, str]]:
    """Return each function that the folder's README names, with the file that is named before it."""
    found, file = [], ""
    for path, function in _SPAN.findall((folder / "README.md").read_text()):
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
