"""Work that an accelerator has queued at a planned end is done on all ranks before any of them leaves.

A stub of the device shows it on any machine: collectives of the last steps wait in its queue.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.common.processes import agent_over
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch

TRAINS = """
import json, os, sys, time
import torch
import torch.distributed as dist
import elasticjob

class QueueDevice:
    # The module of an accelerator that works when it is synchronized, or when its queue is full.
    def __init__(self):
        self.work = []

    def is_initialized(self):
        return True

    def launch(self, work):
        self.work.append(work)
        if len(self.work) > 6:
            self.work.pop(0)()

    def synchronize(self):
        while self.work:
            self.work.pop(0)()

torch.privateuseone = device = QueueDevice()
torch.accelerator.current_accelerator = (
    lambda check_available=False: None if check_available else torch.device("privateuseone")
)
folder = sys.argv[1]
weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
model = torch.nn.Module()
model.weight = weight

class SavedByRank0:
    # What a script without elasticjob.State does.
    path, step = os.path.join(folder, "saved"), 0

    def sync(self):
        elasticjob.on_stop(self.save)
        if os.path.exists(self.path):
            self.step, value = json.loads(open(self.path).read())
            weight.data.fill_(value)
        elasticjob.progress(self.step)

    def save(self):
        if dist.get_rank() == 0:
            device.synchronize()  # as reading a tensor of the device does
            with open(self.path, "w") as file:
                json.dump([self.step, weight.item()], file)

state = STATE

def launch_step():
    samples = torch.arange(12 * state.step, 12 * state.step + 12, dtype=torch.float64)
    gradient = samples[dist.get_rank() :: dist.get_world_size()].sum()
    device.launch(lambda: dist.all_reduce(gradient))
    device.launch(lambda: weight.data.mul_(3).add_(gradient).remainder_(1_000_003))

def train():
    dist.init_process_group("gloo")
    state.sync()
    me = f"rank {dist.get_rank()} of {dist.get_world_size()} pid {os.getpid()}"
    print(f"{me} begins at {state.step} with {weight.item():.0f}", flush=True)
    begin, stop = state.step, torch.zeros(1)
    while not stop.item():
        launch_step()
        state.step += 1
        if state.step == begin + 8:
            print(me, "trains", flush=True)
        stop.fill_(float(dist.get_rank() == 0 and os.path.exists(os.path.join(folder, "done"))))
        dist.broadcast(stop, 0)
        elasticjob.progress(state.step)
        time.sleep(0.005)
    device.synchronize()
    print(f"{me} ends at {state.step} with {weight.item():.0f}", flush=True)
    dist.destroy_process_group()

CALL
"""
STATE = "elasticjob.State(model=model, step=0)"
SCRIPTS = {
    "State": (STATE, "train()"),
    "on_stop": ("SavedByRank0()", "train()"),
    "restartable": (STATE, "elasticjob.restartable(train)()"),
}
"""The state of the script, and how it calls its function."""


def weight_after(steps: int) -> int:
    """Return what a single process computes. All numbers are integers, which a float64 adds up without error."""
    weight = 0
    for step in range(steps):
        weight = (3 * weight + sum(range(12 * step, 12 * step + 12))) % 1_000_003
    return weight


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_last_step_of_a_planned_end_is_done_on_all_ranks(kind: str, tmp_path: Path) -> None:
    """A node is drained. A rank that left with work in its queue would break the collectives of the others, or leave
    them waiting: the job would restart, or not go on."""
    state, call = SCRIPTS[kind]
    command = [*script(tmp_path, TRAINS.replace("STATE", state).replace("CALL", call)), str(tmp_path)]
    job = manifest(
        command,
        replicas=3,
        preload=["torch"],
        elasticPolicy={"minReplicas": 2, "maxReplicas": 3},
        stopGraceSeconds=600,
    )
    with LocalRun(job, tmp_path) as run:
        os.kill(agent_over(int(run.wait_for(r"rank 2 of 3 pid (\d+) trains")[1])), signal.SIGTERM)
        run.wait_for(r"rank 1 of 2 .* begins")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert "toy succeeded; 0 restarts" in run.text
    last = int(re.findall(r"toy-0-0: round \S+ ends after step (\d+)", run.text)[0])
    expected = [(3, rank, 0, 0) for rank in range(3)] + [(2, rank, last, weight_after(last)) for rank in range(2)]
    found = re.findall(r"rank (\d) of (\d) pid (\d+) begins at (\d+) with (\d+)", run.text)
    first_rounds = found[: len(expected)]  # the replacement of the node may have joined since
    assert sorted((int(w), int(r), int(s), int(weight)) for r, w, _, s, weight in first_rounds) == sorted(expected)
    ends = {(int(step), int(weight)) for step, weight in re.findall(r"ends at (\d+) with (\d+)", run.text)}
    assert [weight_after(step) for step, _ in ends] == [weight for _, weight in ends]
    pids = [{pid for _, w, pid, *_ in first_rounds if w == world} for world in ("3", "2")]
    assert len(pids[0] & pids[1]) == (2 if kind == "restartable" else 0)
