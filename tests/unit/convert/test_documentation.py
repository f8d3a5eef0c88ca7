"""The examples in the pages about moving to elasticjob are what the command prints."""

from __future__ import annotations

import re

import pytest

from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.yaml_text import manifest_text
from support.cluster.kubectl import REPOSITORY

PAGES = [
    "docs/operate/migrate-from-hyperpod.md",
    "docs/operate/migrate-from-jobset.md",
    "docs/operate/migrate-from-kubeflow.md",
]


@pytest.mark.parametrize("path", PAGES)
def test_the_example_in_the_documentation(path: str) -> None:
    page = (REPOSITORY / path).read_text()
    before, after = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    notes = re.findall(r"```\nnote: (.*?)```", page, re.DOTALL)
    manifests, lines = convert_documents(parse_documents(before, "page"), "page")
    assert manifest_text(manifests) == after
    assert lines == [line for note in notes for line in note.splitlines()]
