"""`elasticjob run` refuses a program that does not exist before any node starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elasticjob._runtime.local.manifest.program_check import find_missing_program

BROKEN = "import a_module_that_is_not_there\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.py", "package/__init__.py", "package/__main__.py", "plain/__init__.py", "zipped/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/__init__.py").write_text(BROKEN)
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    return tmp_path


def missing(folder: Path, command: list[str]) -> str:
    argv = [sys.executable if word == "python" else word for word in command]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return find_missing_program(argv, {**os.environ, "PATH": path}, str(folder))


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "--lr", "1"],
        ["python", "zipped"],
        ["python", "-m", "package"],
        ["python", "-m", "train"],
        ["python", "-m", "broken"],
        ["python", "-m", "broken.part"],
        ["python", "-m", "elasticjob._runtime.local.launch_entry"],
        ["python", "-c", "import nope"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["torchrun", "--no-python", "sh", "nope"],
        ["torchrun", "part-${local_rank}.py"],
        ["sh", "-c", "python nope.py"],
        ["./run"],
        ["python", "--no-such-flag", "nope.py"],
    ],
    ids=" ".join,
)
def test_a_command_is_accepted(command: list[str], folder: Path) -> None:
    assert missing(folder, command) == ""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "nope.py"], "{folder}/nope.py: no such file"),
        (["python", "plain"], "{folder}/plain: is a directory without __main__.py"),
        (["torchrun", "--nnodes=1", "nope.py"], "{folder}/nope.py: no such file"),
        (["python", "-m", "nope"], "no module named 'nope'"),
        (["python", "-m", "package.nope"], "no module named 'package.nope'"),
        (["python", "-m", "nope.part"], "no module named 'nope'"),
        (["python", "-m", "plain"], "no module named 'plain.__main__'"),
        (["torchrun", "-m", "nope"], "no module named 'nope'"),
        (["no-such-program"], "no-such-program: no such program on PATH"),
        (["./nope.sh"], "{folder}/nope.sh: no such file"),
        (["./run.sh"], "{folder}/run.sh: permission denied: it is not executable"),
        (["/no/python3", "train.py"], "/no/python3: no such file"),
    ],
    ids=" ".join,
)
def test_a_command_is_refused(command: list[str], expected: str, folder: Path) -> None:
    assert missing(folder, command).startswith(expected.format(folder=folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_script_that_may_not_be_read_is_refused(folder: Path) -> None:
    (folder / "train.py").chmod(0)
    assert missing(folder, ["python", "train.py"]) == f"{folder}/train.py: permission denied"


def test_a_working_folder_that_does_not_exist_is_refused(folder: Path) -> None:
    expected = f"workingDir: {folder}/nope is not a directory of this machine"
    assert missing(folder / "nope", ["python", "train.py"]) == expected
