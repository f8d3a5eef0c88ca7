"""How the code is laid out: no folder of the product has more modules than a newcomer reads through."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_MODULES = 12
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
