"""The state of processes that survive rounds is in their objects alone, and is saved whatever ends the job.

The copy takes longer than `stopGraceSeconds`: it is waited for.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.snapshot_format.state_file import read_file_header
from support.agent.worker_scripts import script
from support.common.processes import agent_over
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch

TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
import elasticjob
from elasticjob.training.replicated.state import internals

folder, raises = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(4, 4)
state = elasticjob.State(model=model, step=0, late=0, path=os.path.join(folder, "state"))

writer = internals(state).writer
write_copy = writer.write

def slow_copy(packed):
    time.sleep(3)
    return write_copy(packed)

writer.write = slow_copy

@elasticjob.restartable
def train():
    dist.init_process_group("gloo")
    state.sync()
    begin, late = state.step, state.late
    while True:
        if os.path.exists(os.path.join(folder, f"broken-{os.getpid()}")):
            raise OSError("broken process")
        if state.step == raises and dist.get_rank() == 1:
            raise ValueError("bad batch")
        total = torch.ones(1)
        dist.all_reduce(total)
        model.weight.data += total
        state.step += 1
        state.late = state.step
        if state.step == begin + 10:
            print("trains rank", dist.get_rank(), "from", begin, late, "pid", os.getpid(), flush=True)
        elasticjob.progress(state.step)
        time.sleep(0.03)

train()
"""


def start(folder: Path, raises: int = -1, *, restarts: int = 0, rules: Sequence[Any] = (), **spec: int) -> LocalRun:
    command = [*script(folder, TRAINS), str(folder), str(raises)]
    policy = {"maxRestarts": restarts, "rules": list(rules)}
    return LocalRun(manifest(command, preload=["torch"], failurePolicy=policy, **spec), folder)  # type: ignore[arg-type]


def saved_step(folder: Path) -> int:
    return read_file_header(str(folder / "state")).step


@pytest.mark.parametrize("grace", [1, 0])
def test_the_steps_before_a_failure_that_ends_the_job(grace: int, tmp_path: Path) -> None:
    """The other ranks were inside the step that failed, which is undone."""
    with start(tmp_path, raises=30, replicas=3, stopGraceSeconds=grace) as run:
        assert run.exit_code() == 1, run.text
    assert "ValueError: bad batch" in run.text
    assert saved_step(tmp_path) == 30


def test_the_steps_before_a_failure_that_a_rule_makes_the_jobs_end(tmp_path: Path) -> None:
    rule = {"name": "bad-data", "action": "FailJob", "onReasons": ["UserError"]}
    with start(tmp_path, raises=30, replicas=3, restarts=5, rules=[rule]) as run:
        assert run.exit_code() == 1, run.text
    assert "bad-data" in run.text
    assert saved_step(tmp_path) == 30


def test_the_last_step_of_a_job_that_is_stopped(tmp_path: Path) -> None:
    with start(tmp_path, replicas=3) as run:
        run.wait_for("trains rank 0")
        run.signal(signal.SIGTERM)
        run.exit_code()
    assert saved_step(tmp_path) == last_step(run)


@pytest.mark.parametrize("grace", [1, 0])
def test_the_last_step_of_the_only_node(grace: int, tmp_path: Path) -> None:
    with start(tmp_path, replicas=1, stopGraceSeconds=grace) as run:
        pid = int(run.wait_for(r"trains rank 0 from 0 0 pid (\d+)")[1])
        os.kill(agent_over(pid), signal.SIGTERM)
        found = run.wait_for(r"trains rank 0 from (\d+) (\d+) pid (\d+)")
        run.signal(signal.SIGTERM)
        run.exit_code()
    assert int(found[3]) != pid
    assert int(found[1]) == int(found[2]) == int(re.findall(r"ends after step (\d+)", run.text)[0])


def test_the_last_step_of_a_process_that_fails_again_and_again(tmp_path: Path) -> None:
    """It is the only one, and its script has committed nothing."""
    with start(tmp_path, replicas=1, restarts=3) as run:
        pid = int(run.wait_for(r"trains rank 0 from 0 0 pid (\d+)")[1])
        (tmp_path / f"broken-{pid}").touch()
        run.wait_for("rank 0 failed 2 times in a row before its first step")
        step, new_pid = map(int, run.wait_for(r"trains rank 0 from (\d+) \d+ pid (\d+)").groups())
        run.signal(signal.SIGTERM)
        run.exit_code()
    assert new_pid != pid
    assert step >= 10


def last_step(run: LocalRun) -> int:
    return int(re.findall(r"ends after step (\d+)", run.text)[-1])
