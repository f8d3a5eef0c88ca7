"""A private name is used only in the module that defines it: in the product, in tests, and in scripts that are text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
DOCUMENTED = {"_exit", "_fields", "_replace"}
"""Public in spite of their underscore: names of `os` and of named tuples that modules of the product have too."""
FOREIGN = {
    "inprocess._MODULES",  # ours: a public name in that module would belong to the API
    "re._parser",
    "registry._watching",  # kopf
    "_resource_tracker._pid", "p._pid", "tracker._pid",  # multiprocessing
    "self._checkpoint_connector",  # Lightning, in a method that replaces one of its own
    "distributed_c10d._update_default_pg", "distributed_c10d._world", "jit._state", "options._timeout",  # torch
    "child._buffers", "parameter._version", "tensor._version", "value._version", "weight._version",  # torch
}  # fmt: skip
"""Private names of others, each after the last word of what it is a name of: modules of the product have it too."""
_DEFINED = re.compile(
    r"(?:\b(?:def|class) |^)(_[A-Za-z]\w*)|(?:\b(?:self|cls)\.|^ +)(_[A-Za-z]\w*)(?=:| =[^=])", re.MULTILINE
)
"""Most definitions, to leave out files at once that use only names of their own: to parse all takes seconds."""
_PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
_REFLECTION = {"setattr", "getattr", "delattr", "hasattr"}


def defined_in(text: str) -> set[str]:
    return {name for names in _DEFINED.findall(text) for name in names if name}


def defined_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that a module, its functions and its classes give."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Yield each use of a name of an object or module: its line, the last word of the object, and the name."""
    for node in nodes:
        match node:
            case ast.Attribute(value=owner, attr=name) if name.startswith("_"):
                yield node.lineno, last_word(owner), name
            case ast.ImportFrom(module=module, names=names):
                yield from ((node.lineno, (module or "").rpartition(".")[2], alias.name) for alias in names)
            case ast.Call(func=function, args=[first, *others]) if last_word(function) in _REFLECTION:
                match [first, *others[:1]]:
                    case [ast.Constant(value=str(path)), *_]:
                        owners, _, name = path.rpartition(".")
                        yield node.lineno, owners.rpartition(".")[2], name
                    case [_, ast.Constant(value=str(name))]:
                        yield node.lineno, last_word(first), name


def last_word(expression: ast.expr) -> str:
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def programs(nodes: list[ast.AST]) -> Iterator[tuple[int, list[ast.AST]]]:
    """Yield the texts of several lines in a module that are Python: the line before their first one, and the nodes."""
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                pass
            case ast.JoinedStr(values=parts):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "filled_in" for part in parts)
            case _:
                continue
        if "\n" in text.strip() and _PRIVATE.search(text):
            try:
                yield node.lineno - 1, list(ast.walk(ast.parse(dedent(text))))
            except SyntaxError:
                continue


def foreign_uses(text: str, private: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line of each use of one of these names that a module, or a script in it, does not define."""
    module = list(ast.walk(ast.parse(text)))
    for start, nodes in [(0, module), *programs(module)]:
        others = private - set(defined_names(nodes)) - DOCUMENTED
        for line, owner, name in used_names(nodes):
            if name in others and f"{owner}.{name}" not in FOREIGN:
                yield start + line, f"{owner}.{name}"


def test_private_names_are_used_only_in_their_module() -> None:
    folders = [ROOT / name for name in ("agent", "operator", "tests")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) if "benchmarks" not in path.parts]
    texts = {path.relative_to(ROOT): path.read_text() for path in paths}  # tests of benchmarks use names of these
    defined = {path: defined_in(text) for path, text in texts.items()}
    product = {name for path, names in defined.items() if path.parts[0] != "tests" for name in names}
    assert len(product) > 1000
    found = [
        f"{path}:{line} {name}"
        for path, text in texts.items()
        if (private := product.intersection(_PRIVATE.findall(text))) - defined[path]
        for line, name in foreign_uses(text, private)
    ]
    assert found == []


def test_each_way_to_a_private_name_is_found() -> None:
    text = """
from a import _b
c._d.e
monkeypatch.setattr(f, "_g", 1)
monkeypatch.setattr("h._i", 1)
self._j
class K:
    def __init__(self):
        self._l = f"m._n {self._l}"
SCRIPT = '''
import o
o._p
'''
FILLED_IN = f'''
{SCRIPT}
o._q
'''
"""
    names = {f"_{letter}" for letter in "abcdefghijklmnopq"}
    found = sorted(foreign_uses(text, names))
    assert found == [(2, "a._b"), (3, "c._d"), (4, "f._g"), (5, "h._i"), (6, "self._j"), (12, "o._p"), (16, "o._q")]
