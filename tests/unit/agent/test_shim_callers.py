"""Which processes a fork of the warm one may stand for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from elasticjob.agent.start_workers.command import Mode, PythonCommand, read_own_agent
from elasticjob.agent.start_workers.shim_callers import Allowed, Caller, Refused, Warmth, judge

PYTHON = sys.executable
ENV = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
WARM = Warmth(PYTHON, ENV, ())
WORKER = Caller((PYTHON, "-u", "train.py"), ENV, "/", 0, (), (), (), of_torchrun=True)
TORCHRUN = replace(WORKER, program=("torchrun", "train.py"))


def test_a_torchrun_is_the_script_or_where_the_image_has_its_own_agent_itself() -> None:
    script = PythonCommand(PYTHON, ("-u",), Mode.SCRIPT, "train.py")
    itself = PythonCommand(PYTHON, ("-u",), Mode.MODULE, "torch.distributed.run", ("train.py",))
    assert judge(TORCHRUN, WARM, PYTHON) == Allowed(script, PYTHON)
    assert judge(TORCHRUN, WARM, PYTHON, read_own_agent) == Allowed(itself, PYTHON)
    assert judge(WORKER, WARM, PYTHON, read_own_agent) == Allowed(script, PYTHON)


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
    verdict = judge(replace(WORKER, env=ENV | variables), WARM, PYTHON, read_own_agent)
    assert (verdict.why.rpartition(": ")[2] if isinstance(verdict, Refused) else "") == why


def test_what_is_refused_is_told_the_program_it_stands_for() -> None:
    verdict = judge(replace(WORKER, standing=("another user",)), WARM, PYTHON, read_own_agent)
    assert isinstance(verdict, Refused)
    assert verdict.program == (PYTHON, "-u", "train.py")
