"""Launchers in the words of a command: which ones are refused, and which scripts only mention one."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.command import CommandError, parse_command, parse_own_agent_command
from elasticjob._runtime.agent.start_workers.in_workers.refused import REFUSED
from elasticjob._runtime.contract.commands.launchers import REFUSED_LAUNCHERS, check_launcher, find_refused_launcher
from elasticjob._runtime.contract.names import Backend
from elasticjob._runtime.local.manifest.manifest import ManifestError, parse_local_job
from elasticjob_operator.model.observed import Observed
from support.local.run import manifest
from support.operator.build import job, run, status_of


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("mpirun -np 8 python train.py", "mpirun starts ranks of its own"),
        ("/opt/amazon/openmpi/bin/mpirun -N 8 python train.py", "spec.nprocPerNode"),
        ("env NCCL_DEBUG=INFO srun python train.py", "srun starts ranks of its own"),
        ("hyperpodrun --nproc_per_node=8 train.py", "hyperpodrun is an elastic agent of its own: write torchrun"),
        ("ft_launcher --ft-rank-heartbeat-timeout=900 train.py", "spec.hangPolicy"),
        ("python -m nvidia_resiliency_ext.fault_tolerance.launcher train.py", "ft_launcher is an elastic agent"),
        ("python -m hyperpod_elastic_agent.run train.py", "hyperpodrun is an elastic agent"),
    ],
)
def test_a_launcher_that_is_not_run_is_refused_with_what_to_write(words: str, sentence: str) -> None:
    assert sentence in find_refused_launcher(words.split())
    with pytest.raises(CommandError, match=sentence):
        parse_command(words.split())


@pytest.mark.parametrize(
    "script",
    [
        "cd /data && mpirun -np 8 python train.py",
        "set -e\nsource env.sh\n# it's MPI\nexport N=$(nproc)\nexec srun \\\n  python train.py 2>&1 | tee log",
        "NCCL_DEBUG=INFO ft_launcher --nnodes 1 train.py; echo done",
        "mpirun -np 4 python -n 1 train.py",
        "mpirun -np 8 a 2>&1 &\nwait",
    ],
)
def test_the_last_command_of_a_script_may_be_such_a_launcher(script: str) -> None:
    assert find_refused_launcher(["bash", "-ec", script])


@pytest.mark.parametrize(
    "script",
    [
        "",
        "echo mpirun",
        "it's",
        "which mpirun; python train.py",
        "python train.py 'mpirun'",
        "mpirun -np 4 tokenize && torchrun train.py",
        "if [ $A ]; then srun python train.py; else torchrun train.py; fi",
        "torchrun train.py || srun python train.py",
        "mpirun -np 1 python train.py",
        "srun --ntasks=1 python train.py",
        "cat <<E\nmpirun\nE",
    ],
)
def test_a_script_that_may_train_otherwise_is_not_refused(script: str) -> None:
    assert not find_refused_launcher(["sh", "-c", script])


@pytest.mark.parametrize(
    "words", ["python mpirun", "torchrun srun.py", "bash srun.sh", "accelerate launch t.py", "deepspeed t.py", "bash"]
)
def test_other_commands_are_not_refused(words: str) -> None:
    assert not find_refused_launcher(words.split())
    assert not find_refused_launcher([])


def test_a_command_that_is_an_agent_itself_may_be_any_launcher() -> None:
    check_launcher(["ft_launcher", "train.py"], Backend.C10D)
    parse_own_agent_command(["ft_launcher", "train.py"])
    with pytest.raises(CommandError):
        check_launcher(["ft_launcher", "train.py"], Backend.ELASTICJOB)


@pytest.mark.parametrize("command", [["mpirun", "python", "train.py"], ["bash", "-c", "cd x && srun python train.py"]])
def test_a_job_of_such_a_launcher_fails_before_it_starts(command: list[str]) -> None:
    raw: Any = manifest(command)
    with pytest.raises(ManifestError, match="starts ranks of its own"):
        parse_local_job(raw)
    p = run(Observed(job(template=raw["spec"]["template"])))
    (failed,) = status_of(p)["conditions"]
    assert (failed["type"], failed["reason"]) == ("Failed", "InvalidSpec")
    assert "starts ranks of its own" in failed["message"]


def test_the_sentences_below_a_worker_are_the_same() -> None:
    assert {name: find_refused_launcher([name, "train.py"]) for name in REFUSED_LAUNCHERS} == REFUSED
