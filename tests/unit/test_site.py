"""The documentation builds as a site, without a page that nothing leads to and without a link to nothing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.sax import parseString
from xml.sax.handler import ContentHandler

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]* src=.?(?:https?:)?//|<link[^>]* href=.?(?:https?:)?//[^>]*stylesheet"
)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing_from_other_hosts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".ci/site.yml", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "search/search_index.json").exists()
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert [str(page) for page, text in pages.items() if FETCHED.search(text)] == []
    # The theme fetches mermaid from another host for such a block.
    assert [str(page) for page, text in pages.items() if "mermaid" in re.findall(r'class="([^"]+)"', text)] == []


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("site_sequences")


def test_a_sequence_diagram_becomes_a_picture_with_its_texts(sequences: Any) -> None:
    source = "sequenceDiagram\n    participant A as agent\n    A->>B: a < b\n    B--xA: lost\n    Note over A,B: both\n"
    page = sequences.with_pictures(f"before\n\n```mermaid\n{source}```\n\nafter\n")
    assert page.startswith("before\n\n<div")
    assert page.endswith("</div>\n\nafter\n")
    parseString(sequences.picture(source), ContentHandler())  # noqa: S317 (a text of ours)
    for text in (">agent<", ">B<", ">a &lt; b<", ">lost<", ">both<"):
        assert text in page


@pytest.mark.parametrize("source", ["flowchart LR\n    A-->B\n", "sequenceDiagram\n    A=>B: no such arrow\n"])
def test_a_diagram_that_has_no_rule_is_refused(sequences: Any, source: str) -> None:
    with pytest.raises(ValueError, match=r"only sequenceDiagram|has no rule"):
        sequences.picture(source)
