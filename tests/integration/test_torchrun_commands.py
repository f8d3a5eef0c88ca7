"""`torchrun ...` and `python -m torch.distributed.launch ...` as commands of a job: the script runs as under torch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local.run import LocalRun, manifest

SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
"""
RUN = (sys.executable, "-m", "torch.distributed.run")
LAUNCH = (sys.executable, "-m", "torch.distributed.launch")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_number_of_workers_in_the_command_counts(script: str, tmp_path: Path) -> None:
    command = [*RUN, "--nproc-per-node=3", "--nnodes=1", "--max-restarts=5", script, "a"]
    with LocalRun(manifest(command, replicas=2), tmp_path) as run:
        assert run.exit_code() == 0
    assert sorted(line.split("]:")[1] for line in run.text.splitlines() if "]:rank" in line) == [
        f"rank {rank} of 6 ['a']" for rank in range(6)
    ]
    assert run.text.count("torchrun options without effect: --nnodes (spec.replicas") == 1


def test_two_different_numbers_are_an_error_before_anything_runs(script: str, tmp_path: Path) -> None:
    with LocalRun(manifest([*RUN, "--nproc-per-node=3", script], nprocPerNode=2), tmp_path) as run:
        assert run.exit_code() == 64
    assert run.text.strip() == (
        "elasticjob run: spec: nprocPerNode is 2 and the command has --nproc-per-node=3: "
        "remove one of them, or make them equal"
    )


@pytest.mark.parametrize(("variable", "code", "message"), [
    ("PET_NPROC_PER_NODE=2", 0, "rank 1 of 2"),
    ("PET_NPROC_PER_NODE=x", 1, "--nproc-per-node 'x': want a number from 1 to 64"),
    ("PET_VIRTUAL_LOCAL_RANK=1", 1, "--virtual-local-rank is not supported"),
])  # fmt: skip
def test_the_agent_reads_a_variable_that_the_manifest_does_not_have(
    variable: str, code: int, message: str, script: str, tmp_path: Path
) -> None:
    with LocalRun(manifest([*RUN, script]), tmp_path, within=["env", variable]) as run:
        assert run.exit_code() == code
    assert message in run.text
    assert ("toy-0-0 did not start: its configuration is invalid" in run.text) == (code != 0)


@pytest.mark.parametrize("preload", [[], ["json"]])
@pytest.mark.parametrize(("options", "arguments"), [((), "['--local-rank={}', 'a']"), (("--use-env",), "['a']")])
def test_the_launch_module_passes_the_local_rank(
    options: tuple[str, ...], arguments: str, preload: list[str], script: str, tmp_path: Path
) -> None:
    """Forked and executed workers have the same arguments."""
    command = [*LAUNCH, *options, "--nproc-per-node=2", script, "a"]
    with LocalRun(manifest(command, preload=preload), tmp_path) as run:
        assert run.exit_code() == 0
    for rank in range(2):
        assert f"rank {rank} of 2 {arguments.format(rank)}" in run.text
    assert ("workers start by exec" in run.text) == (not preload)


def test_torchrun_in_a_shell_does_not_run_fewer_workers_than_it_names(script: str, tmp_path: Path) -> None:
    text = f"exec {' '.join(RUN)} --nproc-per-node=3 {script}".replace(sys.executable, "python")
    job: Any = manifest(["bash", "-c", text], preload=["json"], failurePolicy={"maxRestarts": 0})
    path = [{"name": "PATH", "value": f"{Path(sys.executable).parent}:/usr/bin:/bin"}]
    job["spec"]["template"]["spec"]["containers"][0]["env"] = path
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    assert "this pod runs 1 worker, because the shell hides the number; set spec.nprocPerNode: 3" in run.text
    assert "]:rank 0 of" not in run.text


GOT = """
import os, signal, sys
def stop(number, frame):
    print("got", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, stop)
print("agent", os.getppid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("option", ["--signals-to-handle=SIGUSR1", "--role=a"])
def test_the_agent_leaves_on_the_signals_that_the_option_names(option: str, tmp_path: Path) -> None:
    """Without the option, SIGUSR1 kills the agent: no worker gets the signal."""
    (tmp_path / "train.py").write_text(GOT)
    with LocalRun(manifest([*RUN, option, str(tmp_path / "train.py")]), tmp_path) as run:
        os.kill(int(run.wait_for(r"agent (\d+)")[1]), signal.SIGUSR1)
        if option.startswith("--signals"):
            run.wait_for(f"got {signal.SIGUSR1.value}$")
            run.wait_for("exit 143, left")
        else:
            run.wait_for("toy-0-0 ended .SIGUSR1")
        run.signal(signal.SIGINT)
