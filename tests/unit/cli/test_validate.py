"""`elasticjob validate`: manifests are checked as the API server does."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from .conftest import Run

JOB = """
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata: {name: bert}
spec:
  replicas: 2
  template: {spec: {containers: [{name: trainer, image: x, command: [python, train.py]}]}}
"""


def test_a_valid_file_and_each_mistake(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad, other = (tmp_path / name for name in ("good.yaml", "bad.yaml", "other.yaml"))
    good.write_text(JOB)
    bad.write_text(JOB.replace("replicas: 2", "replica: 2") + "---" + JOB.replace("v1alpha1", "v9"))
    other.write_text("kind: Pod")
    shown = run("validate", str(good))
    assert (shown.code, shown.out) == (0, f"{good}: every ElasticJob is valid\n")
    shown = run("validate", str(good), str(bad), str(other), str(tmp_path / "none.yaml"))
    lines = shown.err.splitlines()
    assert (shown.code, len(lines)) == (1, 4)
    assert "bad.yaml: bert: " in lines[0]
    assert "replica" in lines[0]
    assert "want elasticjob.dev/v1alpha1, got 'elasticjob.dev/v9'" in lines[1]
    assert lines[2].endswith("other.yaml: has no ElasticJob")
    assert lines[3].endswith("none.yaml: No such file or directory")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a: [b"))
    assert "-: is not YAML" in run("validate", "-").err
