"""Find and replace code by its syntax tree: neither its formatting nor the file that it is in matters."""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Match:
    """A node of a file, and the name of the function that it is in; empty outside of functions."""

    path: Path
    function: str
    node: ast.AST


def find_code(folder: Path, code: str, within: str = "") -> list[Match]:
    """Return where the files of a folder have this expression, statement or `case`.

    `within`: the name of the function that has it; empty: anywhere.
    """
    wanted = _fingerprint(_parse(code))
    found = [match for path in sorted(folder.rglob("*.py")) for match in _index(path).get(wanted, ())]
    return [match for match in found if within in ("", match.function)]


def replace_code(match: Match, code: str) -> str:
    """Return the text of the match's file with `code` in its place; empty code removes a statement."""
    copies: dict[int, Any] = {}
    tree = copy.deepcopy(_tree(match.path), copies)
    return ast.unparse(_Replacement(copies[id(match.node)], _parse(code)).visit(tree))


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._old:
            return self._new
        found: ast.AST = super().visit(node)
        return found


def _parse(code: str) -> ast.AST:
    """Return the node of an expression, of one statement or of a `case`; `pass` for empty code."""
    if code.startswith("case "):
        (match,) = ast.parse(f"match _:\n{textwrap.indent(code, '    ')}").body
        assert isinstance(match, ast.Match)
        return match.cases[0]
    (statement,) = ast.parse(code or "pass").body
    return statement.value if isinstance(statement, ast.Expr) else statement


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _index(path: Path) -> dict[int, list[Match]]:
    index: dict[int, list[Match]] = {}
    for node, function in _walk(_tree(path), ""):
        if isinstance(node, (ast.expr, ast.stmt, ast.match_case)):
            index.setdefault(_fingerprint(node), []).append(Match(path, function, node))
    return index


def _walk(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    yield node, function
    inside = node.name if isinstance(node, _FUNCTIONS) else function
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, inside)


_fingerprints: dict[ast.AST, int] = {}


def _fingerprint(node: ast.AST) -> int:
    """Return a hash that is equal for equal code. It is made of those of the children; each is computed once."""
    found = _fingerprints.get(node)
    if found is None:
        found = _fingerprints[node] = hash((type(node), *(_hash(value) for _, value in ast.iter_fields(node))))
    return found


def _hash(value: object) -> int:
    if isinstance(value, ast.AST):
        return _fingerprint(value)
    if isinstance(value, list):
        return hash(tuple(map(_hash, value)))
    return hash((type(value), value))  # 1, 1.0 and True are equal
