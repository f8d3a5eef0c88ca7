"""A process is lost whose successor takes long to start: the others go on without its node until it waits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.common.processes import agent_over, stayed
from support.local.run import LocalRun, manifest
from support.training.fault_draw import NODES, Incident, RankFault
from support.training.faulty_job import FaultyJob

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

LEFT_OUT = "a round runs without this pod until its new processes are at their function"
SECONDS = 3.0
"""What each process needs up to its function."""


@pytest.mark.parametrize("rank", [pytest.param(2, marks=pytest.mark.deep), 0])
def test_the_others_make_steps_while_a_killed_process_starts_again(rank: int, tmp_path: Path) -> None:
    """The smaller world makes steps before the new process comes to its function. Then it joins in one pause."""
    with FaultyJob(tmp_path, set_up=SECONDS) as job:
        report = job.inject(Incident((RankFault("SIGKILL", rank, "step"),)))
        assert (report.kept, report.replaced) == (NODES - 1, 1)
        before, smaller, after = job.ledger.rounds.values()
        assert [before.world, smaller.world, after.world] == [NODES, NODES - 1, NODES]
        (new,) = set(after.processes.values()) - set(before.processes.values())
        assert smaller.begin < job.ledger.set_up[new], "steps are made before the new process is at its function"
        assert smaller.done_by_all == after.begin, "the join loses no step"
        job.finish()
    assert "toy succeeded; 1 restart" in job.text
    assert LEFT_OUT in job.text


TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
import elasticjob

folder = sys.argv[1]
print("starts pid", os.getpid(), "round", os.environ["ELASTICJOB_ROUND"], flush=True)
time.sleep(3)
BEFORE_THE_FUNCTION
print("set up pid", os.getpid(), "round", os.environ["ELASTICJOB_ROUND"], flush=True)
state = elasticjob.State(model=torch.nn.Linear(4, 4), step=0)

@elasticjob.restartable(spare_process=SPARE_PROCESS)
def train():
    dist.init_process_group("gloo")
    state.sync()
    begin, done = state.step, torch.zeros(1)
    while not done.item():
        dist.all_reduce(torch.ones(1))
        state.step += 1
        if state.step == begin + 5:
            print(f"trains rank {dist.get_rank()} of {dist.get_world_size()} pid {os.getpid()} "
                  f"round {os.environ['ELASTICJOB_ROUND']}", flush=True)
        if dist.get_rank() == 0:
            done.fill_(float(os.path.exists(os.path.join(folder, "done"))))
        dist.broadcast(done, 0)
        elasticjob.progress(state.step)
        time.sleep(0.03)
    dist.destroy_process_group()

train()
"""


def start(
    folder: Path, before_the_function: str = "", *, low: int = 1, spare_process: bool = False, **spec: Any
) -> LocalRun:
    source = TRAINS.replace("BEFORE_THE_FUNCTION", before_the_function).replace("SPARE_PROCESS", str(spare_process))
    command = [*script(folder, source), str(folder)]
    policy: dict[str, Any] = {"elasticPolicy": {"minReplicas": low, "maxReplicas": 3}, "preload": ["torch"]}
    return LocalRun(manifest(command, **policy, **spec), folder)


def trains(run: LocalRun, world: int) -> dict[int, int]:
    """Wait until all ranks of a world of this size train; return their processes."""
    found: dict[int, int] = {}
    while len(found) < world:
        rank, pid = run.wait_for(rf"trains rank (\d+) of {world} pid (\d+)").groups()
        found[int(rank)] = int(pid)
    return found


def test_the_other_process_of_the_pod_waits_and_goes_on_with_the_new_one(tmp_path: Path) -> None:
    """Two pods of two workers: one of four is killed, and the two of the other pod go on."""
    with start(tmp_path, replicas=2, nprocPerNode=2) as run:
        four = trains(run, 4)
        os.kill(four[3], signal.SIGKILL)
        two = trains(run, 2)
        assert stayed(four[0], two[0], run.text)
        new = int(run.wait_for(r"set up pid (\d+) round 0\.0\.1")[1])
        again = trains(run, 4)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert all(stayed(four[rank], again[rank], run.text) for rank in range(3))
    assert again[3] == new
    assert "toy succeeded; 1 restart" in run.text


def test_a_spare_process_that_is_not_at_the_function_goes_on_as_the_new_one(tmp_path: Path) -> None:
    with start(tmp_path, replicas=2, spare_process=True) as run:
        two = trains(run, 2)
        by_agent: dict[int, int] = {}
        while len(by_agent) < 2:
            pid = int(run.wait_for(r"starts pid (\d+) round 0\.0\.1")[1])
            by_agent[agent_over(pid)] = pid
        spare = by_agent[agent_over(two[1])]
        os.kill(two[1], signal.SIGKILL)
        trains(run, 1)
        again = trains(run, 2)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert stayed(two[0], again[0], run.text)
    assert again[1] == spare


def test_the_others_wait_in_a_job_of_fixed_size(tmp_path: Path) -> None:
    with start(tmp_path, replicas=2, low=2) as run:
        two = trains(run, 2)
        os.kill(two[1], signal.SIGKILL)
        again = trains(run, 2)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert LEFT_OUT not in run.text
    assert again[1] != two[1]


def test_the_others_wait_once_a_script_is_known_to_need_its_round_before_the_function(tmp_path: Path) -> None:
    """Its first start ahead ends early, and it starts again in its round. The next time the others wait."""
    with start(tmp_path, 'print("store at", os.environ["MASTER_ADDR"], flush=True)', replicas=3) as run:
        ranks = trains(run, 3)
        for worlds in ((2, 3), (3,)):
            os.kill(ranks[2], signal.SIGKILL)
            for world in worlds:
                ranks = trains(run, world)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert run.text.count("has not reached its function ahead of the next round") == 1
    assert run.text.count(LEFT_OUT) == 1
