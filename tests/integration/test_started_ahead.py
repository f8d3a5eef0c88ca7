"""A node that joins a job whose function can be called again runs its script up to the function ahead of its round."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.common.processes import agent_over, stayed
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch

TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
import elasticjob

folder = sys.argv[1]
memory = b"x" * (GB_AHEAD << 30 if os.environ["ELASTICJOB_ROUND"] == "0.0.0" else 0)
print("sets up pid", os.getpid(), "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"],
      "round", os.environ["ELASTICJOB_ROUND"], flush=True)
while os.path.exists(os.path.join(folder, "hold")):
    time.sleep(0.02)
BEFORE_THE_FUNCTION
state = None if MADE_INSIDE else elasticjob.State(model=torch.nn.Linear(4, 4), step=0, late=0)

@elasticjob.restartable
def train():
    global state
    dist.init_process_group("gloo")
    if MADE_INSIDE:
        state = elasticjob.State(model=torch.nn.Linear(4, 4), step=0, late=0)
    state.sync()
    if dist.get_world_size() == 3:
        print(f"begins at {state.step} rank {dist.get_rank()}", flush=True)
        assert state.late == state.step, "what follows the step is kept at a planned end"
    begin, world, done = state.step, dist.get_world_size(), torch.zeros(1)
    while not done.item():
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.late = state.step
        if (state.step - begin) % 10 == 0:
            print(f"step {state.step} rank {dist.get_rank()} of {world} pid {os.getpid()}", flush=True)
        if dist.get_rank() == 0:
            done.fill_(float(os.path.exists(os.path.join(folder, "done"))))
        dist.broadcast(done, 0)
        elasticjob.progress(state.step)
        time.sleep(0.03)
    dist.destroy_process_group()

train()
"""
SET_UP_AHEAD = r"sets up pid (\d+) rank (\d+) of (\d+) round 0\.0\.0"


def start(folder: Path, before_the_function: str = "", *, made_inside: bool = False, gb_ahead: int = 0) -> LocalRun:
    source = TRAINS.replace("BEFORE_THE_FUNCTION", before_the_function).replace("MADE_INSIDE", str(made_inside))
    source = source.replace("GB_AHEAD", str(gb_ahead))
    command = [*script(folder, source), str(folder)]
    spec: dict[str, Any] = {
        "elasticPolicy": {"minReplicas": 2, "maxReplicas": 3},
        "preload": ["torch"],
    }
    return LocalRun(manifest(command, replicas=3, **spec), folder)


def lose_rank_1(run: LocalRun) -> int:
    """Wait for training, kill the node of rank 1, and return the process that survives as rank 0."""
    survivor = int(run.wait_for(r"step \d+ rank 0 of 3 pid (\d+)")[1])
    os.kill(agent_over(int(run.wait_for(r"step \d+ rank 1 of 3 pid (\d+)")[1])), signal.SIGKILL)
    return survivor


def test_the_others_train_while_a_new_node_sets_up(tmp_path: Path) -> None:
    """The new process waits in its script. Only when it gets on does the round of the others end."""
    with start(tmp_path) as run:
        survivor = lose_rank_1(run)
        (tmp_path / "hold").touch()
        pid, *ranks = run.wait_for(SET_UP_AHEAD).groups()
        assert ranks == ["2", "3"]
        for _ in range(5):
            assert stayed(survivor, int(run.wait_for(r"step \d+ rank 0 of 2 pid (\d+)")[1]), run.text)
        (tmp_path / "hold").unlink()
        run.wait_for(r"rank 2 has received the training state from another rank: .* GB/s\) over lo")
        assert run.wait_for(r"step \d+ rank 2 of 3 pid (\d+)")[1] == pid
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert len(re.findall("sets up pid", run.text)) == 4, "three nodes and the new one"


def test_a_script_that_needs_its_round_before_the_function_starts_again_in_it(tmp_path: Path) -> None:
    with start(tmp_path, 'print("store at", os.environ["MASTER_ADDR"], flush=True)') as run:
        lose_rank_1(run)
        run.wait_for("has not reached its function ahead of the next round")
        run.wait_for(r"step \d+ rank 2 of 3 pid (\d+)")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert "KeyError: 'MASTER_ADDR'" in run.text
    assert "toy succeeded; 0 restarts" in run.text


def test_a_node_that_waits_does_not_bring_back_an_old_checkpoint(tmp_path: Path) -> None:
    """It has read one before its function. All nodes that trained since are lost."""
    (tmp_path / "checkpoint").write_text("1")
    reads = 'print("read", open(folder + "/checkpoint").read(), "pid", os.getpid(), flush=True)'
    with start(
        tmp_path,
        reads
        + """
while os.path.exists(os.path.join(folder, "wait")):
    time.sleep(0.02)
""",
        made_inside=True,
    ) as run:
        lose_rank_1(run)
        (tmp_path / "wait").touch()
        waiting = run.wait_for(SET_UP_AHEAD)[1]
        run.wait_for(f"read 1 pid {waiting}")
        (tmp_path / "checkpoint").write_text("2")
        for agent in [agent_over(int(run.wait_for(rf"step \d+ rank {n} of 2 pid (\d+)")[1])) for n in range(2)]:
            os.kill(agent, signal.SIGKILL)
        (tmp_path / "wait").unlink()
        run.wait_for(rf"process {waiting} of local rank 0 may have read an old one")
        again = [int(run.wait_for(rf"step \d+ rank {rank} of \d pid (\d+)")[1]) for rank in range(2)]
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    for pid in again:
        assert re.findall(rf"read (\d) pid {pid}$", run.text, re.MULTILINE) == ["2"]
    assert "toy succeeded; 0 restarts" in run.text


def test_a_job_ends_while_a_new_node_sets_up(tmp_path: Path) -> None:
    """The new process is gone before its agent, though it needs a while to give its memory back."""
    with start(tmp_path, gb_ahead=1) as run:
        lose_rank_1(run)
        (tmp_path / "hold").touch()
        pid = run.wait_for(SET_UP_AHEAD)[1]
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert not Path(f"/proc/{pid}").exists()


def test_a_state_that_the_function_makes_is_committed_at_a_planned_end(tmp_path: Path) -> None:
    """Its objects end with the function, though the process stays."""
    with start(tmp_path, made_inside=True) as run:
        lose_rank_1(run)
        reached = int(run.wait_for(r"step (\d+) rank 0 of 2 pid \d+")[1])
        begins = [int(run.wait_for(r"begins at (\d+) rank")[1]) for _ in range(3)]
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert len(set(begins)) == 1
    assert begins[0] >= reached
