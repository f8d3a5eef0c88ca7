"""How the code is laid out: small folders, `make unit` without torch, and the places that CONTRIBUTING.md names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_MODULES = 12
NEED_TORCH = {"accelerate", "lightning", "torch", "torchdata", "transformers"}
EXCEPTIONS = {
    "agent/elasticjob/inprocess": "the modules of NVIDIA's package, by whose names scripts import them",
    "agent/elasticjob/_runtime/agent/start_workers/in_workers": "they import each other as a package that no program"
    " has, of which a folder below could not import its parent by an absolute name",
}
"""Folders that may have more, and why."""


def test_no_folder_has_too_many_modules() -> None:
    modules = Counter(
        str(path.parent.relative_to(ROOT))
        for folder in ("agent", "operator")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    )
    assert len(modules) > 60
    assert {folder for folder, count in modules.items() if count > MOST_MODULES} == EXCEPTIONS.keys()


def test_the_places_where_to_make_a_change_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to make a change")[2].partition("\n## ")[0]
    short = dict(re.findall(r"`([A-Z]+)/` is\s+`([\w./]+)`", section))
    places = []
    for path in re.findall(r"`([\w.-]+/[\w./{},-]+)`", section):
        before, brace, rest = path.partition("{")
        names, _, after = rest.partition("}")
        places += [f"{before}{name}{after}" for name in names.split(",")] if brace else [path]
    assert len(short) == 4
    assert len(places) > 50
    full = [ROOT / short.get(first, first) / rest for first, _, rest in (place.partition("/") for place in places)]
    assert [str(path) for path in full if not path.exists()] == []


def imported_packages(tree: ast.AST) -> Iterator[str]:
    """Yield the packages that a test file imports, also in functions and by `pytest.importorskip`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(name)):
                yield name.partition(".")[0]
            case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(name)), *_]):
                yield name.partition(".")[0]


def test_the_tests_of_make_unit_and_make_model_do_not_import_torch() -> None:
    """Those that do are in `tests/with_torch`."""
    files = {
        path: set(imported_packages(ast.parse(path.read_text())))
        for folder in ("unit", "compat", "model")
        for path in (ROOT / "tests" / folder).rglob("*.py")
    }
    assert "hypothesis" in set().union(*files.values())
    assert [str(path) for path, packages in files.items() if packages & NEED_TORCH] == []


def test_each_way_to_import_is_found() -> None:
    text = "import a.b\ndef f():\n    from c.d import e\nx = pytest.importorskip('g.h')\n"
    assert set(imported_packages(ast.parse(text))) == {"a", "c", "g"}
