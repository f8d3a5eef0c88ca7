"""Tests use what the product makes public, and none of its private names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOREIGN = {"_exit", "_replace", "_version", "_world"}
"""Names that the product has too, but that tests use of `os`, of named tuples and of torch."""
_DEFINED = re.compile(r"(?:^ *(?:async )?(?:def |class )?|\bself\.)(_[A-Za-z]\w*)", re.MULTILINE)
_PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
_REFLECTION = {"setattr", "getattr", "delattr", "hasattr"}


def is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module and its classes give."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines that use a name of another object or module, and the name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(func=function, args=arguments) if ast.unparse(function).rpartition(".")[2] in _REFLECTION:
                for argument in arguments[:2]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield node.lineno, argument.value.rpartition(".")[2]


def test_tests_use_no_private_names_of_the_product() -> None:
    product = {
        name
        for folder in ("agent", "operator")
        for path in (ROOT / folder).rglob("*.py")
        for name in _DEFINED.findall(path.read_text())
    }
    assert len(product) > 1000
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = "" if "benchmarks" in path.parts else path.read_text()  # those test the benchmarks
        if product.isdisjoint(_PRIVATE.findall(text)):
            continue
        tree = ast.parse(text)
        others = product - set(defined_names(tree)) - FOREIGN
        found += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in used_names(tree) if name in others]
    assert found == []


def test_each_way_to_a_private_name_is_found() -> None:
    text = "from a import _b\nc._d.e\nmonkeypatch.setattr(f, '_g', 1)\nmonkeypatch.setattr('h._i', 1)\nself._j\n"
    assert [name for _, name in used_names(ast.parse(text)) if is_private(name)] == ["_b", "_g", "_i", "_d"]
