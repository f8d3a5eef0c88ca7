"""The examples in the pages about moving to elasticjob are what the command prints."""

from __future__ import annotations

import pytest

from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.yaml_text import manifest_text
from support.cluster.kubectl import REPOSITORY
from support.docs.blocks import parse_blocks

PAGES = [
    "docs/operate/migrate-from-hyperpod.md",
    "docs/operate/migrate-from-jobset.md",
    "docs/operate/migrate-from-kubeflow.md",
]


@pytest.mark.parametrize("path", PAGES)
def test_the_example_in_the_documentation(path: str) -> None:
    page = (REPOSITORY / path).read_text()
    blocks = parse_blocks(path, page)
    *_, before, after = (block.text for block in blocks if block.language == "yaml")
    notes = [b.text.removeprefix("note: ") for b in blocks if not b.language and b.text.startswith("note: ")]
    manifests, lines = convert_documents(parse_documents(before, "page"), "page")
    assert manifest_text(manifests) == after
    assert lines == [line for note in notes for line in note.splitlines()]
