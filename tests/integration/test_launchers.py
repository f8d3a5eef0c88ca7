"""Launchers below a pod's command train in the one world of the job, or the job fails with what to write instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from support.local.run import LocalRun, manifest

ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

TRAIN = """
import os, sys, torch, torch.distributed as dist
print("role", os.environ["ROLE_NAME"], flush=True)
dist.init_process_group("gloo")
ranks = torch.tensor([1.0])
dist.all_reduce(ranks)
print("trained", *sys.argv[1:], "as", dist.get_rank(), "of", int(ranks.item()), flush=True)
dist.destroy_process_group()
"""
"""Each rank says in which world it has trained."""
DRIVER = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-m", "torch.distributed.run", "--standalone", "train.py"]))
"""
IN_PROCESS = """
import sys
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node", "1", "train.py", "in", "process"])
print("the driver goes on", flush=True)
"""
FUNCTION = """
import os
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def train(word):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("trained", word, "as", dist.get_rank(), "of", dist.get_world_size(), flush=True)
    dist.barrier()  # a rank that ends its group at once may end it while another one still forms it
    dist.destroy_process_group()
    return word

for word in ("first", "second"):
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    assert elastic_launch(config, train)(word) == {int(os.environ["RANK"]): word}
"""
TWO_GROUPS = """
import torch.distributed as dist

for word in ("first", "second"):
    store, rank, world = next(dist.rendezvous("env://"))
    print("found", store.check([f"address of {rank}"]), flush=True)
    store.set(f"address of {rank}", word)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    dist.barrier()
    print("trained", word, "as", rank, "of", world, flush=True)
    dist.destroy_process_group()
"""
"""Each group looks for what the one before it has left in the store of the round."""
OWN_RANKS = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(
        [sys.executable, "train.py"],
        env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]},
    )
    for rank in range(3)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
"""Starts ranks of its own on each node, as deepspeed and composer do."""
MPIRUN = """
import os, subprocess, sys
command = [sys.executable if word == "python" else word for word in sys.argv[3:]]
ranks = [subprocess.Popen(command) for _ in range(int(sys.argv[2]))]
os.wait()
for rank in ranks:
    rank.kill()
sys.exit(1)
"""
"""Starts a program several times as the same rank, and ends with the first process that ends."""
CAUGHT = (
    """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
dist.destroy_process_group()
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError:
    pass
"""
    + TRAIN.replace("dist.destroy_process_group()", "")
    + """
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""
)
"""Plans a larger training, is refused, catches that, trains as it should, and forms other groups then."""
STAYS = TRAIN.replace("dist.destroy_process_group()", "import signal; signal.pause()")
"""Trains until it is ended."""
HELPERS = TRAIN.replace(
    "dist.destroy_process_group()",
    """
import subprocess
code = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
code += "; print('helper ran', flush=True); d.destroy_process_group()"
subprocess.run([sys.executable, "-c", code], check=True)
dist.destroy_process_group()
""",
)
"""A rank that trains and starts a helper with a group of its own, as an inference engine does."""


def run_job(folder: Path, command: list[str], **spec: Any) -> LocalRun:
    """Start a job of two nodes with one worker each; scripts are in `folder`."""
    for name, text in {
        "train.py": TRAIN, "driver.py": DRIVER, "in_process.py": IN_PROCESS, "function.py": FUNCTION,
        "own_ranks.py": OWN_RANKS, "helpers.py": HELPERS, "caught.py": CAUGHT,
        "two_groups.py": TWO_GROUPS, "stays.py": STAYS,
        "stage.sh": f"#!/bin/bash\nset -e\n{TORCHRUN} --standalone train.py from a file\n",
        "mpirun": f"#!{sys.executable}\n{MPIRUN}", "mpi.sh": "./mpirun -np 2 python stays.py\n",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    for name in ("stage.sh", "mpirun"):
        (folder / name).chmod(0o755)
    return LocalRun(manifest(command, replicas=2, **spec), folder)


COLD: list[str] = []
WARM = ["torch"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("command", "preload", "words"),
    [
        (
            ["bash", "-c", f"{TORCHRUN} --standalone --local-addr=h --role trainer --tee 3 train.py by path"],
            WARM,
            ["by path"],
        ),
        pytest.param(["./stage.sh"], COLD, ["from a file"], marks=pytest.mark.deep),
        pytest.param([sys.executable, "driver.py"], WARM, [""], marks=pytest.mark.deep),
        ([sys.executable, "in_process.py"], COLD, ["in process"]),
        ([sys.executable, "function.py"], WARM, ["first", "second"]),
        (
            [
                "bash",
                "-c",
                "torchrun --role trainer --tee=3 train.py one && torchrun --standalone train.py two",
            ],
            WARM,
            ["one", "two"],
        ),
        pytest.param(
            ["bash", "-c", f"python train.py one; {TORCHRUN} train.py two"],
            COLD,
            ["one", "two"],
            marks=pytest.mark.deep,
        ),
        ([ACCELERATE, "launch", "--use_fsdp", "--num_processes", "2", "train.py", "by", "fsdp"], COLD, ["by fsdp"]),
        pytest.param(
            [ACCELERATE, "launch", "--cpu", "--num_processes", "2", "train.py", "on", "cpu"],
            COLD,
            ["on cpu"],
            marks=pytest.mark.deep,
        ),
    ],
    ids=[
        "full path",
        "script file",
        "subprocess",
        "in process",
        "function",
        "two torchruns",
        "mixed",
        "accelerate",
        "accelerate on CPUs",
    ],
)
def test_a_launcher_trains_in_the_world_of_the_job(
    command: list[str], preload: list[str], words: list[str], tmp_path: Path
) -> None:
    with run_job(tmp_path, command, preload=preload) as run:
        assert run.exit_code() == 0, run.text
    for word in words:
        for rank in range(2):
            assert f"trained {word} as {rank} of 2".replace("  ", " ") in run.text
    assert run.text.count("trained") == 2 * len(words), run.text
    if "--tee" in command[-1]:
        assert run.text.count("role trainer") == 2, run.text
        assert "[trainer0]:role trainer" in run.text, run.text
        assert "of logs have no effect" not in run.text, run.text
        assert ("--local-addr has no effect: the address is the pod's" in run.text) == (TORCHRUN in command[-1])
    assert run.text.count("the driver goes on") == (2 if "in_process.py" in command else 0)


@pytest.mark.torch
def test_a_group_does_not_find_what_another_group_of_its_process_has_left(tmp_path: Path) -> None:
    with run_job(tmp_path, [sys.executable, "two_groups.py"], preload=WARM) as run:
        assert run.exit_code() == 0, run.text
    assert "found True" not in run.text, run.text
    assert run.text.count("trained second") == 2, run.text


@pytest.mark.torch
@pytest.mark.parametrize(
    ("command", "preload", "reason", "message"),
    [
        ([sys.executable, "own_ranks.py", "29777"], WARM, "TrainsApart", "it would train apart from the others"),
        (["bash", "-c", f"{TORCHRUN} --nproc-per-node=4 train.py"], COLD, "TrainsApart", "set spec.nprocPerNode: 4"),
        (["bash", "-c", "torchrun --nproc-per-node=4 train.py"], WARM, "CommandRefused", "set spec.nprocPerNode: 4"),
    ],
    ids=["own ranks", "number, full path", "number"],
)
def test_what_would_train_apart_fails_the_job_at_once(
    command: list[str], preload: list[str], reason: str, message: str, tmp_path: Path
) -> None:
    with run_job(tmp_path, command, preload=preload, failurePolicy={"maxRestarts": 3}) as run:
        assert run.exit_code() != 0, run.text
    assert f"({reason})" in run.text, run.text
    assert message in run.text, run.text
    assert "trained" not in run.text, run.text
    assert "0 restarts" in run.text, run.text


@pytest.mark.torch
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(f"PYTHONPATH=. {TORCHRUN} --standalone --nproc-per-node=1 stays.py", marks=pytest.mark.deep),
        f"unset PYTHONPATH; exec {sys.executable} -I -m torch.distributed.run --standalone --nproc-per-node=1 stays.py",
    ],
    ids=["replaced", "isolated"],
)
def test_ranks_whose_python_looks_for_nothing_fail_the_job_too(command: str, tmp_path: Path) -> None:
    with run_job(tmp_path, ["bash", "-c", command], failurePolicy={"maxRestarts": 3}) as run:
        assert run.exit_code() != 0, run.text
    assert "(TrainsApart)" in run.text, run.text
    assert "PYTHONPATH=.:$PYTHONPATH" in run.text, run.text
    assert "0 restarts" in run.text, run.text


@pytest.mark.torch
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bash mpi.sh", "mpirun starts ranks of its own, which the job does not restart: write the program behind it"),
        ("python stays.py & python stays.py & wait -n", "the job would train twice, side by side"),
    ],
    ids=["mpirun", "&"],
)
def test_a_script_that_runs_twice_as_the_same_rank_fails_the_job(command: str, message: str, tmp_path: Path) -> None:
    with run_job(tmp_path, ["bash", "-c", command], preload=COLD, failurePolicy={"maxRestarts": 3}) as run:
        assert run.exit_code() != 0, run.text
    assert "(TrainsApart)" in run.text, run.text
    assert message in run.text, run.text
    assert "0 restarts" in run.text, run.text


@pytest.mark.torch
def test_what_a_worker_that_trains_starts_may_form_groups_of_its_own(tmp_path: Path) -> None:
    with run_job(tmp_path, [sys.executable, "helpers.py"], preload=WARM) as run:
        assert run.exit_code() == 0, run.text
    assert run.text.count("helper ran") == 2


@pytest.mark.torch
def test_a_refusal_that_a_script_catches_is_of_no_consequence_once_it_trains(tmp_path: Path) -> None:
    with run_job(tmp_path, [sys.executable, "caught.py"], preload=COLD) as run:
        assert run.exit_code() == 0, run.text
    assert run.text.count("trained as") == 2


@pytest.mark.torch
def test_a_torchrun_that_names_no_number_has_that_of_the_job(tmp_path: Path) -> None:
    command = ["bash", "-c", f"export MASTER_ADDR=127.0.0.1 MASTER_PORT=1; {TORCHRUN} train.py"]
    with run_job(tmp_path, command, preload=COLD, nprocPerNode=2) as run:
        assert run.exit_code() == 0, run.text
    assert all(f"trained as {rank} of 4" in run.text for rank in range(4)), run.text


@pytest.mark.torch
def test_a_script_that_means_it_may_train_apart(tmp_path: Path) -> None:
    command = ["env", "ALLOW_SEPARATE_WORLDS=1", TORCHRUN, "--standalone", "--nproc-per-node=1", "train.py"]
    with run_job(tmp_path, command) as run:
        assert run.exit_code() == 0, run.text
    assert run.text.count("as 0 of 1") == 2
