"""The examples in the pages about moving to elasticjob are what the command prints."""

from __future__ import annotations

import re

import pytest

from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.yaml_text import manifest_text
from support.cluster.kubectl import REPOSITORY


@pytest.mark.parametrize("origin", ["kubeflow", "jobset", "hyperpod"])
def test_the_example_in_the_documentation(origin: str) -> None:
    page = (REPOSITORY / f"docs/operate/migrate-from-{origin}.md").read_text()
    before, after = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    notes = re.findall(r"```\nnote: (.*?)```", page, re.DOTALL)
    manifests, lines = convert_documents(parse_documents(before, "page"), "page")
    assert manifest_text(manifests) == after
    assert lines == [line for note in notes for line in note.splitlines()]
