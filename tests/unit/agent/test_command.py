"""Which commands the fork server can run."""

from __future__ import annotations

import pytest

from elasticjob.agent.start_workers.command import (
    PlainCommand,
    ProgramMode,
    PythonCommand,
    is_torchrun,
    parse_command,
    parse_own_agent_command,
    torchrun_options,
)

S, M, C = ProgramMode.SCRIPT, ProgramMode.MODULE, ProgramMode.CODE


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py", PythonCommand("python", (), S, "train.py")),
        ("python3 -u train.py --lr 1", PythonCommand("python3", ("-u",), S, "train.py", ("--lr", "1"))),
        ("/opt/venv/bin/python3.12 train.py", PythonCommand("/opt/venv/bin/python3.12", (), S, "train.py")),
        ("python -m pkg.train -m 2", PythonCommand("python", (), M, "pkg.train", ("-m", "2"))),
        ("python -mpkg.train x", PythonCommand("python", (), M, "pkg.train", ("x",))),
        ("python -Bum pkg x", PythonCommand("python", ("-Bu",), M, "pkg", ("x",))),
        ("python -c pass a", PythonCommand("python", (), C, "pass", ("a",))),
        ("python -O -W error -Xdev t.py", PythonCommand("python", ("-O", "-W", "error", "-X", "dev"), S, "t.py")),
        ("torchrun train.py --lr 1", PythonCommand("PY", ("-u",), S, "train.py", ("--lr", "1"))),
        (
            "torchrun --nproc-per-node 2 --standalone --rdzv_id=7 -t 3 -m pkg.train x",
            PythonCommand("PY", ("-u",), M, "pkg.train", ("x",)),
        ),
        ("/usr/bin/torchrun --nnodes=1:4 -r3 t.py", PythonCommand("PY", ("-u",), S, "t.py")),
        ("python -m torch.distributed.run --nnodes 2 t.py a", PythonCommand("python", ("-u",), S, "t.py", ("a",))),
        ("torchrun --no-python ./run.sh a", PlainCommand(("./run.sh", "a"), "torchrun --no-python")),
    ],
)
def test_parse_command(line: str, expected: object) -> None:
    assert parse_command(line.split(), "PY") == expected


@pytest.mark.parametrize(
    "line",
    [
        "bash -c x",
        "./train",
        "python",
        "python -i t.py",
        "python -",
        "python -V",
        "python --version",
        "python -m",
        "torchrun",
        "env A=1 python t.py",
        "python-config t.py",
    ],
)
def test_other_commands_start_by_exec_unchanged(line: str) -> None:
    command = parse_command(line.split(), "PY")
    assert isinstance(command, PlainCommand)
    assert command.argv == tuple(line.split())
    assert command.reason


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "torchrun --log-dir /l -r3 --tee=0:1,1:2 -m t --role x",
            {"log-dir": "/l", "redirects": "3", "tee": "0:1,1:2"},
        ),
        ("torchrun --log_dir /l -r 1 -t 2 --standalone t.py --role x", {"log-dir": "/l", "redirects": "1", "tee": "2"}),
        ("python -u -m torch.distributed.run --role x t.py", {"role": "x"}),
        ("python t.py --role x", {}),
        ("bash -c torchrun", {}),
    ],
)
def test_torchrun_options(line: str, expected: dict[str, str]) -> None:
    assert {n: v for n, v in torchrun_options(line.split()).items() if v} == expected


@pytest.mark.parametrize("line", ["python -Bu t.py a", "python -W error -m pkg a", "python -c pass -x"])
def test_argv_returns_the_command_line(line: str) -> None:
    command = parse_command(line.split(), "PY")
    assert command.argv == tuple(line.split())


RUN = "torch.distributed.run"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun -r3 t.py a", PythonCommand("PY", ("-u",), M, RUN, ("-r3", "t.py", "a"))),
        ("python -m torch.distributed.run t.py", PythonCommand("python", (), M, RUN, ("t.py",))),
        ("python launch.py", PythonCommand("python", (), S, "launch.py")),
        ("bash run.sh", PlainCommand(("bash", "run.sh"), "bash is not Python")),
    ],
)
def test_parse_own_agent_command(line: str, expected: object) -> None:
    command = parse_own_agent_command(line.split(), "PY")
    assert command == expected
    if isinstance(command, PythonCommand):
        assert is_torchrun(command) == (RUN in command.argv)
