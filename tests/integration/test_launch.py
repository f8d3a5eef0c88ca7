"""`elasticjob.launch`: functions and programs as workers, and their return values."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import elasticjob
from elasticjob import WorkerState
from elasticjob._runtime.local.manifest.manifest import ManifestError

ROOT = str(Path(elasticjob.__file__).parents[1])


def run(folder: Path, text: str) -> str:
    """Run a program that calls `launch` and return its output."""
    (folder / "program.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": ROOT}
    process = subprocess.run([sys.executable, "program.py"], cwd=folder, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_return_values_by_global_rank(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
import os, elasticjob
def train(base):
    return base + 10 * int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
if __name__ == "__main__":
    result = elasticjob.launch(train, 5, nproc_per_node=2, nodes=2, preload=["json"])
    print(result.state.value, result.is_failed(), sorted(result.return_values.items()), result.failures)
""",
    )
    values = [(0, (5, "4")), (1, (15, "4")), (2, (25, "4")), (3, (35, "4"))]
    assert output.splitlines()[-1] == f"SUCCEEDED False {values} {{}}"


def test_a_failure_has_the_root_causes_rank_and_no_values(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
import os, time, elasticjob
def train():
    if os.environ["RANK"] == "1":
        raise ValueError("bad batch")
    time.sleep(60)
if __name__ == "__main__":
    result = elasticjob.launch(train, nproc_per_node=2, max_restarts=0, preload=["json"])
    (rank, failure), = result.failures.items()
    print(result.state.value, result.is_failed(), result.return_values, rank, failure.exception, failure.message)
""",
    )
    assert re.fullmatch(r"FAILED True {} 1 ValueError bad batch \(\w+\.py, line 5\)", output.splitlines()[-1])


def test_values_are_those_of_the_round_that_succeeded(tmp_path: Path) -> None:
    """A rank that returned before another failed runs again."""
    output = run(
        tmp_path,
        """
import os, elasticjob
def train():
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and restarts == "0":
        raise SystemExit(1)
    return restarts
if __name__ == "__main__":
    print(elasticjob.launch(train, nproc_per_node=2, preload=["json"]).return_values)
""",
    )
    assert output.splitlines()[-1] in ("{0: '1', 1: '1'}", "{1: '1', 0: '1'}")


def test_a_program_has_no_return_values(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    result = elasticjob.launch(sys.executable, "-c", "print(1)", preload=["json"])
    assert (result.state, result.return_values) == (WorkerState.SUCCEEDED, {})
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_invalid_numbers_of_nodes_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"elasticPolicy\.minReplicas is above maxReplicas"):
        elasticjob.launch("true", nodes=2, min_nodes=3)


@pytest.mark.parametrize("state", list(WorkerState))
def test_worker_states_that_run(state: WorkerState) -> None:
    assert WorkerState.is_running(state) == (state.value in ("HEALTHY", "UNHEALTHY"))


@pytest.mark.torch
def test_worker_states_are_torchs() -> None:
    torchs = pytest.importorskip("torch.distributed.elastic.agent.server.api").WorkerState
    assert {state.name: state.value for state in WorkerState} == {state.name: state.value for state in torchs}
    assert [torchs.is_running(torchs(s.value)) for s in WorkerState] == [WorkerState.is_running(s) for s in WorkerState]


@pytest.mark.torch
def test_the_example_returns_the_same_loss_on_all_ranks() -> None:
    pytest.importorskip("torch")
    example = Path(__file__).parents[2] / "examples/launch/train.py"
    command = [sys.executable, str(example), "--workers=2", "--steps=20"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^rank (\d) of (\d): loss (\S+)$", done.stdout, re.MULTILINE)
    assert [(rank, world) for rank, world, _ in found] == [(str(rank), "4") for rank in range(4)]
    assert len({loss for *_, loss in found}) == 1
    assert 0 < float(found[0][2]) < 1
