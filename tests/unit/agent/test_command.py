"""Which commands the fork server can run."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.start_workers.command import (
    CommandError,
    PlainCommand,
    ProgramMode,
    PythonCommand,
    is_torchrun,
    lost_log_options,
    parse_command,
    parse_own_agent_command,
    parse_shell_command,
    shell_role,
    torchrun_options,
    with_local_rank,
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


RANK = "--local-rank=${local_rank}"
LAUNCH = "python -m torch.distributed.launch"


@pytest.mark.parametrize(
    ("line", "env", "expected"),
    [
        ("torchrun --stand t.py a", {}, PythonCommand("PY", ("-u",), S, "t.py", ("a",))),
        ("torchrun --no-py ./run.sh", {}, PlainCommand(("./run.sh",), "torchrun --no-python")),
        ("torchrun ./run.sh", {"PET_NO_PYTHON": "1"}, PlainCommand(("./run.sh",), "torchrun --no-python")),
        ("torchrun t.py", {"PET_NO_PYTHON": "0"}, PythonCommand("PY", ("-u",), S, "t.py")),
        ("torchrun pkg.train", {"PET_MODULE": "1"}, PythonCommand("PY", ("-u",), M, "pkg.train")),
        ("python pkg.train", {"PET_MODULE": "1"}, PythonCommand("python", (), S, "pkg.train")),
        ("torchrun --run-path /t.py a", {}, PythonCommand("PY", ("-u",), S, "/t.py", ("a",))),
        ("torchrun --run-path --no-python /t.py", {}, PythonCommand("PY", ("-u",), S, "/t.py")),
        ("torchrun t.py", {"PYTHON_EXEC": "/opt/python"}, PythonCommand("/opt/python", ("-u",), S, "t.py")),
        (f"{LAUNCH} --use-env t.py a", {}, PythonCommand("python", ("-u",), S, "t.py", ("a",))),
        (f"{LAUNCH} t.py a", {}, PythonCommand("python", ("-u",), S, "t.py", (RANK, "a"), has_macros=True)),
        (f"{LAUNCH} -m pkg a", {}, PythonCommand("python", ("-u",), M, "pkg", (RANK, "a"), has_macros=True)),
        (f"{LAUNCH} --use-env --no-python ./r", {}, PlainCommand(("./r",), "torchrun --no-python")),
        ("torchrun t.py --out=${local_rank}", {},
         PythonCommand("PY", ("-u",), S, "t.py", ("--out=${local_rank}",), has_macros=True)),
    ],
)  # fmt: skip
def test_torchruns_commands_and_variables(line: str, env: dict[str, str], expected: object) -> None:
    assert parse_command(line.split(), "PY", env) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("torchrun --standalone", "torchrun: the following arguments are required: training_script"),
        ("torchrun --unknown t.py", "torchrun: unrecognized arguments: --unknown"),
        ("torchrun --max-restarts=x t.py", "torchrun: argument --max-restarts"),
        ("torchrun --nproc-per-node= t.py", "--nproc-per-node is empty: name a number"),
        ("torchrun -m --no-python t.py", "--no-python and --module contradict each other"),
        (f"{LAUNCH} --no-python ./run.sh", "--no-python needs --use-env"),
        ("torchrun --numa-binding=node t.py", "--numa-binding is not supported: the agent binds no processors"),
        ("torchrun --virtual-local-rank t.py", "--virtual-local-rank is not supported: each worker has its own"),
        ("torchrun --logs-specs=mine t.py", "--logs-specs is not supported"),
        ("torchrun --duplicate-stdout-filters=a t.py", "--duplicate-stdout-filters is not supported"),
    ],
)
def test_commands_that_torchrun_or_elasticjob_refuse(line: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_command(line.split(), "PY")
    assert message in str(caught.value)
    own = parse_own_agent_command(line.split(), "PY")
    assert isinstance(own, PythonCommand)  # torchrun itself reads the command
    inside = parse_shell_command(line.split(), "PY", {})
    assert isinstance(inside, PythonCommand)
    assert (inside.mode, message in inside.args[0]) == (C, True)


def test_each_worker_gets_its_local_rank() -> None:
    command = PythonCommand("python", ("-u",), S, "t.py", ("--local-rank=${local_rank}", "$$x", "$y"), has_macros=True)
    assert with_local_rank(command, "3").argv == ("python", "-u", "t.py", "--local-rank=3", "$x", "$y")
    plain = PlainCommand(("./${local_rank}", "${local_rank}"), "", has_macros=True)
    assert with_local_rank(plain, "3").argv == ("./${local_rank}", "3")
    assert with_local_rank(parse_command(["python", "t.py", "${local_rank}"]), "3").argv[-1] == "${local_rank}"
    inside = parse_shell_command(f"{LAUNCH} t.py".split(), "PY", {"LOCAL_RANK": "2"})
    assert inside.argv == ("python", "-u", "t.py", "--local-rank=2")


@pytest.mark.parametrize(
    ("asked", "running", "runs"),
    [("3", "3", True), ("3", "1", False), ("auto", "1", True), ("3", "", True)],
)
def test_torchrun_in_a_shell_asks_for_the_number_of_workers_that_the_node_runs(
    asked: str, running: str, runs: bool
) -> None:
    argv = ["torchrun", f"--nproc-per-node={asked}", "t.py"]
    command = parse_shell_command(argv, "PY", {"LOCAL_WORLD_SIZE": running})
    assert isinstance(command, PythonCommand)
    assert (command.mode is S) == runs
    if not runs:
        assert command.args[0].endswith("set spec.nprocPerNode: 3")


@pytest.mark.parametrize(
    ("line", "env", "role", "missing"),
    [
        ("torchrun --role trainer t.py", {}, "trainer", ""),
        ("torchrun t.py --role=x --tee 3", {"PET_ROLE": "trainer"}, "trainer", ""),
        (
            "torchrun --tee=3 --local-ranks-filter 0 t.py",
            {},
            "",
            "set PET_TEE, PET_LOCAL_RANKS_FILTER in the pod template",
        ),
        ("torchrun --tee=3 --log-dir=/x t.py", {"PET_TEE": "3"}, "", "set PET_LOG_DIR in"),
        ("torchrun --no-such-option t.py", {}, "", ""),
        ("python t.py --tee 3", {}, "", ""),
    ],
)
def test_options_of_a_torchrun_inside_a_worker(line: str, env: dict[str, str], role: str, missing: str) -> None:
    assert shell_role(line.split(), env) == role
    note = lost_log_options(line.split(), env)
    assert missing in note
    assert bool(missing) == bool(note)
