"""Whose place a fork of the fork server can take."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from elasticjob._runtime.agent.start_workers.command import ProgramMode, PythonCommand, parse_own_agent_command
from elasticjob._runtime.agent.start_workers.shims.shim_callers import (
    ExecInstead,
    ForkServerProcess,
    RunInFork,
    ShimCaller,
    fork_or_exec,
)

PYTHON = sys.executable
ENV = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
FORK_SERVER = ForkServerProcess(PYTHON, ENV, ())
WORKER = ShimCaller((PYTHON, "-u", "train.py"), ENV, "/", 0, (), (), (), of_torchrun=True)
TORCHRUN = replace(WORKER, program=("torchrun", "train.py"))


def test_the_torchrun_shim_runs_the_script_or_torchrun_itself_under_an_own_agent() -> None:
    script = PythonCommand(PYTHON, ("-u",), ProgramMode.SCRIPT, "train.py")
    itself = PythonCommand(PYTHON, ("-u",), ProgramMode.MODULE, "torch.distributed.run", ("train.py",))
    assert fork_or_exec(TORCHRUN, FORK_SERVER, PYTHON) == RunInFork(script, PYTHON)
    assert fork_or_exec(TORCHRUN, FORK_SERVER, PYTHON, parse_own_agent_command) == RunInFork(itself, PYTHON)
    assert fork_or_exec(WORKER, FORK_SERVER, PYTHON, parse_own_agent_command) == RunInFork(script, PYTHON)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PET_NNODES": "2"}, ""),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", "TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, ""),
        ({"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS"),
        ({"TORCH_LOGS": "all"}, "TORCH_LOGS"),
    ],
)
def test_variables_that_are_read_at_start_must_not_differ(variables: dict[str, str], reason: str) -> None:
    decision = fork_or_exec(replace(WORKER, env=ENV | variables), FORK_SERVER, PYTHON, parse_own_agent_command)
    assert (decision.reason.rpartition(": ")[2] if isinstance(decision, ExecInstead) else "") == reason


def test_a_refused_caller_gets_the_program_to_execute() -> None:
    decision = fork_or_exec(
        replace(WORKER, process_attributes=("another user",)), FORK_SERVER, PYTHON, parse_own_agent_command
    )
    assert isinstance(decision, ExecInstead)
    assert decision.program == (PYTHON, "-u", "train.py")
