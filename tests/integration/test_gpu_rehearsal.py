"""`make gpu` without a GPU: it says so, and rehearses its programs over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def make_gpu(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "agent")])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_says_so() -> None:
    result = make_gpu(CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert result.stdout.startswith("make gpu needs a GPU and a torch that can use it; `make gpu CPU=1` rehearses")


def test_unknown_rows_are_refused() -> None:
    result = make_gpu("--rows", "in-process,other")
    assert result.returncode == 2
    assert "unknown rows: other; known rows: tests, weights-ahead" in result.stderr


@pytest.mark.timeout(600)
def test_a_rehearsal_runs_the_programs_and_writes_the_page(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    rows = "weights-resized,in-process,commit,guard-alone"
    result = make_gpu("--cpu", "--rows", rows, "--page", str(page), "--results", str(results))
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "all steps succeeded" in result.stdout
    measured = {path.stem: json.loads(path.read_text())["sides"]["ours"] for path in results.iterdir()}
    expected = {"weights-resized", "raises", "killed", "commit", "commit-beside", "guard-alone"}
    assert {f"gpu-{name}" for name in expected} <= measured.keys()
    assert all(side["median"] is not None for side in measured.values())
    assert measured["gpu-weights-resized"]["parts"]["rounds checked"] >= 2
    assert "Measured on one CPU" in page.read_text()
