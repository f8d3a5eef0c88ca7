"""Nothing tells people to install elasticjob from an index or a registry where it does not exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROM_AN_INDEX = re.compile(r"pip install (?:-\S+ )*[\"']?elasticjob\b|helm repo add|oci://|conda install \S*elasticjob")
PLACES = {
    "*.md": ("README.md", "CONTRIBUTING.md", "docs", "charts", "examples"),
    "*.py": ("agent", "operator"),
    "*.txt": ("charts",),
}


def texts() -> dict[str, str]:
    files = [
        file
        for pattern, places in PLACES.items()
        for place in places
        for file in ([ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob(pattern)))
    ]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def test_nobody_is_sent_to_an_index_without_elasticjob() -> None:
    found = texts()
    assert len(found) > 200
    assert [f"{file}: {match[0]}" for file, text in found.items() for match in FROM_AN_INDEX.finditer(text)] == []


def test_such_a_line_is_found() -> None:
    assert FROM_AN_INDEX.search("pip install 'elasticjob[cli]'")
    assert FROM_AN_INDEX.search("pip install -U elasticjob")
    assert not FROM_AN_INDEX.search("pip install '.[torch,cli]'")
