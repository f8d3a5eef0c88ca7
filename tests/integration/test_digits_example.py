"""The digits example is an ordinary script: it resumes, and its results do not depend on the number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples/digits/train.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(*command: str) -> str:
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def losses(output: str) -> dict[int, float]:
    """Return the loss of each step, as rank 0 printed it."""
    found = re.findall(r"step=(\d+) epoch=\d+ loss=([\d.]+) rank=0", output)
    return {int(step): float(loss) for step, loss in found}


@pytest.fixture(scope="module")
def single() -> str:
    """The output of one process in four epochs."""
    return run(str(SCRIPT), "--epochs=4")


def test_the_loss_falls(single: str) -> None:
    by_step = losses(single)
    assert list(by_step) == list(range(1, 65))
    assert by_step[64] < by_step[1] / 3
    assert float(single.split("accuracy=")[1].split()[0]) > 0.8


def test_it_resumes_from_its_checkpoint(single: str, tmp_path: Path) -> None:
    checkpoint = f"--checkpoint={tmp_path / 'shared'}"
    first = run(str(SCRIPT), "--epochs=2", checkpoint)
    second = run(str(SCRIPT), "--epochs=4", checkpoint)
    assert "resumed from step=32" in second
    assert losses(first) | losses(second) == pytest.approx(losses(single), abs=1e-3)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["digits.pt"]


def test_three_processes_have_the_losses_of_one(single: str) -> None:
    three = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(SCRIPT), "--epochs=4")
    assert "world=3" in three
    assert losses(three) == pytest.approx(losses(single), abs=5e-3)
