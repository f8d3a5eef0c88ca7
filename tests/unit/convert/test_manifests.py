"""Manifests of the usual forms and the ElasticJobs that they become, with the notes.

The expected output has all fields that the API is planned to have: what this version's CRD lacks is a note instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticjob._runtime.local.manifest.job_schema import Schema, find_problems
from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.yaml_text import manifest_text
from support.common.planned_fields import bare_schema, planned_schema

MANIFESTS = Path(__file__).parent / "manifests"
INPUTS = sorted(path for path in MANIFESTS.glob("*.yaml") if not path.name.endswith(".expected.yaml"))
NOT_YET = ("not supported yet", "spec.gang.provider")


def use_schema(monkeypatch: pytest.MonkeyPatch, schema: Schema) -> None:
    for module in ("convert.draft", "_runtime.local.manifest.job_schema"):
        monkeypatch.setattr(f"elasticjob.{module}.job_schema", lambda: schema)


def convert(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    return convert_documents(parse_documents(path.read_text(), path.name), path.name)


@pytest.mark.parametrize("path", INPUTS, ids=lambda p: p.stem)
def test_a_manifest_becomes_an_elasticjob(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_schema(monkeypatch, planned_schema())
    manifests, notes = convert(path)
    assert manifest_text(manifests) == path.with_suffix(".expected.yaml").read_text()
    assert notes == path.with_suffix(".notes.txt").read_text().splitlines()


@pytest.mark.parametrize("path", INPUTS, ids=lambda p: p.stem)
def test_a_cluster_of_this_version_accepts_the_result(path: Path) -> None:
    manifests, _ = convert(path)
    jobs = [manifest for manifest in manifests if manifest["kind"] == "ElasticJob"]
    assert jobs
    for job in jobs:
        assert find_problems({**job, "metadata": {"name": "generated", **job["metadata"]}}) == []


@pytest.mark.parametrize("path", INPUTS, ids=lambda p: p.stem)
def test_fields_that_the_api_lacks_become_notes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(yaml.safe_load_all(path.with_suffix(".expected.yaml").read_text()))
    use_schema(monkeypatch, bare_schema())
    manifests, notes = convert(path)
    lacking = sum(len(_remove_planned(manifest)) for manifest in expected)
    assert manifests == expected
    assert len([note for note in notes if "not supported yet" in note]) >= lacking
    written = path.with_suffix(".notes.txt").read_text().splitlines()
    assert [note for note in notes if "not supported yet" not in note] == [
        note for note in written if not any(text in note for text in NOT_YET)
    ]


def _remove_planned(manifest: dict[str, Any]) -> list[str]:
    """Remove the planned fields from an ElasticJob; return their names."""
    spec = manifest["spec"]
    known = bare_schema()["properties"]["spec"]["properties"]
    names = [name for name in spec if name not in known] if manifest["kind"] == "ElasticJob" else []
    for name in names:
        del spec[name]
    if spec.get("failurePolicy", {}).pop("rules", None):
        names.append("rules")
    return names


def test_there_are_manifests_of_all_kinds() -> None:
    kinds = [value["kind"] for path in INPUTS for value in yaml.safe_load_all(path.read_text())]
    assert kinds.count("PyTorchJob") >= 10
    assert kinds.count("TrainJob") >= 2
    assert {"HyperPodPyTorchJob", "JobSet"} <= {*kinds}
