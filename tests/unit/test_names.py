"""One name, one thing: no two public classes, functions or type aliases of the product have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNTERPARTS = {
    "main": "entry point of a command",
    "State": "inprocess.State has the ranks of NVIDIA's wrapper, whose name it keeps; State is the training state",
    "Status": "inprocess.Status is the wrapper's; the operator's is an ElasticJob's",
    "decide": "state_machine.decide is the node's side of rendezvous.decide",
}


def public_names(path: Path) -> list[str]:
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, definitions):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            names.append(ast.unparse(node.target))
    return [name for name in names if not name.startswith("_")]


def test_public_names_are_unique() -> None:
    homes = defaultdict(list)
    for folder in ("agent", "operator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in set(public_names(path)):  # the overloads of a function have one name
                homes[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in COUNTERPARTS} == {}
    assert len(homes) > 500
