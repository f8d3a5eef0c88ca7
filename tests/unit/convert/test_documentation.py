"""The example in docs/operate/migrate-from-kubeflow.md is what the command prints."""

from __future__ import annotations

import re

from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.yaml_text import manifest_text
from support.cluster.kubectl import REPOSITORY


def test_the_example_in_the_documentation() -> None:
    page = (REPOSITORY / "docs/operate/migrate-from-kubeflow.md").read_text()
    before, after = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (notes,) = re.findall(r"```\nnote: (.*?)```", page, re.DOTALL)
    manifests, lines = convert_documents(parse_documents(before, "page"), "page")
    assert manifest_text(manifests) == after
    assert lines == notes.splitlines()
