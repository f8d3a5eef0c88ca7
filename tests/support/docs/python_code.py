"""Names of elasticjob in the Python code of the documentation: whether they exist, and take these keywords.

The modules are read and not imported, because importing torch takes seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from support.cluster.kubectl import REPOSITORY

_AGENT = REPOSITORY / "agent"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def problems(text: str) -> list[str]:
    """Return what is wrong with a part of a script: its syntax, and names or keywords that elasticjob does not have."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    return [problem for node in ast.walk(tree) for problem in _problems_of(node)]


def _problems_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "elasticjob":
        missing = [alias.name for alias in node.names if alias.name not in _names(str(node.module))]
        yield from (f"{node.module} has no {name}" for name in missing)
    elif (name := _public_name(node)) and name not in _names("elasticjob"):
        yield f"elasticjob has no {name}"
    elif isinstance(node, ast.Call) and (function := _public_name(node.func)) in _names("elasticjob"):
        allowed = _keywords(function)
        for word in node.keywords:
            if word.arg and allowed is not None and word.arg not in allowed:
                yield f"elasticjob.{function} has no argument {word.arg}"


def _public_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "elasticjob":
        return node.attr
    return ""


@cache
def _tree(module: str) -> ast.Module:
    path = _AGENT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text() if file.exists() else "")


@cache
def _names(module: str) -> dict[str, str]:
    """Return the names that a module defines or imports, each with the module that defines it."""
    found: dict[str, str] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            found |= {name.name: str(node.module) for name in node.names}
        elif isinstance(node, ast.ClassDef | _Function):
            found[node.name] = module
    return found


def _keywords(name: str) -> set[str] | None:
    """Return the names of the arguments of a public function or class; None if it takes any."""
    (found,) = (n for n in ast.walk(_tree(_names("elasticjob")[name])) if getattr(n, "name", "") == name)
    if isinstance(found, ast.ClassDef):
        found = next((part for part in found.body if getattr(part, "name", "") == "__init__"), found)
    if not isinstance(found, _Function) or found.args.kwarg is not None:
        return None
    return {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}
