"""Workers that are started by exec record the exception that ends them; what they start does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob._runtime.agent.monitoring.exits.worker_exits import read_error_file
from elasticjob._runtime.system.code_root import CODE_ROOT, IN_WORKERS

RAISES = "def train():\n    raise ValueError('the learning rate is negative')\ntrain()\n"


def run(folder: Path, script: str, agent: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script as the worker of an agent with this process id: the test, if None."""
    (folder / "train.py").write_text(script)
    env = {
        **os.environ,
        "PYTHONPATH": f"{CODE_ROOT}/{IN_WORKERS}",
        "ELASTICJOB_AGENT_PID": str(os.getpid() if agent is None else agent),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
    argv = [sys.executable, "train.py"]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_worker_records_the_exception_that_ends_it(tmp_path: Path) -> None:
    done = run(tmp_path, RAISES)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: the learning rate is negative"
    assert done.stderr.count("Traceback") == 1
    recorded = read_error_file(str(tmp_path / "error.json"))
    assert recorded is not None
    assert recorded[:2] == ("ValueError", "the learning rate is negative")
    assert recorded.place == "train.py, line 2"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import sys\nsys.exit(3)\n", 3),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1 / 0'])\n", 0),
        ("import os\nif os.fork() == 0:\n    1 / 0\nos.wait()\n", 0),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\n", 0),
    ],
    ids=["exit code", "a program that it starts", "a process that it forks", "an exception that it handles"],
)
def test_nothing_else_is_recorded(tmp_path: Path, script: str, code: int) -> None:
    assert run(tmp_path, script).returncode == code
    assert not (tmp_path / "error.json").exists()


def test_python_below_the_worker_is_not_the_worker(tmp_path: Path) -> None:
    assert run(tmp_path, RAISES, agent=os.getpid() + 1).returncode == 1
    assert not (tmp_path / "error.json").exists()


def test_an_exception_without_a_text_is_printed_all_the_same(tmp_path: Path) -> None:
    script = "class Odd(Exception):\n    def __str__(self):\n        raise KeyError('odd')\nraise Odd\n"
    done = run(tmp_path, script)
    assert done.returncode == 1
    assert "cannot record the exception: KeyError('odd')" in done.stderr
    assert "Odd: <exception str() failed>" in done.stderr


def test_what_record_has_written_stays(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text('{"message": "RuntimeError: first"}')
    run(tmp_path, RAISES)
    assert "first" in (tmp_path / "error.json").read_text()
