"""Which processes a fork of the warm one may stand for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from elasticjob.agent.start_workers.command import ProgramMode, PythonCommand, parse_own_agent_command
from elasticjob.agent.start_workers.shim_callers import (
    ExecInstead,
    ForkServerProcess,
    RunInFork,
    ShimCaller,
    fork_or_exec,
)

PYTHON = sys.executable
ENV = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
WARM = ForkServerProcess(PYTHON, ENV, ())
WORKER = ShimCaller((PYTHON, "-u", "train.py"), ENV, "/", 0, (), (), (), of_torchrun=True)
TORCHRUN = replace(WORKER, program=("torchrun", "train.py"))


def test_a_torchrun_is_the_script_or_where_the_image_has_its_own_agent_itself() -> None:
    script = PythonCommand(PYTHON, ("-u",), ProgramMode.SCRIPT, "train.py")
    itself = PythonCommand(PYTHON, ("-u",), ProgramMode.MODULE, "torch.distributed.run", ("train.py",))
    assert fork_or_exec(TORCHRUN, WARM, PYTHON) == RunInFork(script, PYTHON)
    assert fork_or_exec(TORCHRUN, WARM, PYTHON, parse_own_agent_command) == RunInFork(itself, PYTHON)
    assert fork_or_exec(WORKER, WARM, PYTHON, parse_own_agent_command) == RunInFork(script, PYTHON)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PET_NNODES": "2"}, ""),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", "TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, ""),
        ({"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS"),
        ({"TORCH_LOGS": "all"}, "TORCH_LOGS"),
    ],
)
def test_variables_that_torch_reads_where_it_uses_them_do_not_matter(variables: dict[str, str], why: str) -> None:
    verdict = fork_or_exec(replace(WORKER, env=ENV | variables), WARM, PYTHON, parse_own_agent_command)
    assert (verdict.reason.rpartition(": ")[2] if isinstance(verdict, ExecInstead) else "") == why


def test_what_is_refused_is_told_the_program_it_stands_for() -> None:
    verdict = fork_or_exec(replace(WORKER, process_attributes=("another user",)), WARM, PYTHON, parse_own_agent_command)
    assert isinstance(verdict, ExecInstead)
    assert verdict.program == (PYTHON, "-u", "train.py")
