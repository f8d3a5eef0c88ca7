"""A rank that does not leave its function is killed, but its state is not lost with its process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

STUCK = """
import ctypes, os, sys, time
import torch
import torch.distributed as dist
import elasticjob

folder = sys.argv[1]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
model = torch.nn.Linear(4, 4, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = elasticjob.State(model=model, optimizer=optimizer)
libc, calls = ctypes.CDLL(None), 0

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def wait_in_c():
    '''Wait as code in C does that is not interrupted: a signal ends only the system call. Others may run Python.'''
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_init(lock, None)
    libc.pthread_mutex_lock(lock)
    say("stuck at", state.step)
    libc.pthread_mutex_lock(lock)  # a second time: it waits for itself, and signals do not end that

@elasticjob.restartable
def train():
    global calls
    calls += 1
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    before = state.step
    state.sync()
    say("round", os.environ["ELASTICJOB_ROUND"], "rank", rank, "pid", os.getpid(), "had", before, "begins at",
        state.step, "weight", model.weight.mean().item())
    if first and calls == 1:
        for step in range(10 if rank == 1 else 1):  # without an all-reduce: only rank 1 has the newest state
            optimizer.zero_grad()
            model.weight.grad = -torch.ones(4, 4)
            optimizer.step()
            state.step += 1
        if rank == 1:
            open(folder + "/stuck", "w").close()
            wait_in_c()
        while not os.path.exists(folder + "/stuck"):
            time.sleep(0.01)
        time.sleep(0.2)
        raise ValueError("bad batch")
    return state.step

say("returned", train())
dist.destroy_process_group()
"""


def test_the_state_of_a_rank_that_is_killed_because_it_waits_in_c(tmp_path: Path) -> None:
    """It alone has the newest state. The other rank raises, and the agent kills this one after `stopGraceSeconds`."""
    job = manifest([*script(tmp_path, STUCK), str(tmp_path)], replicas=2, stopGraceSeconds=5, preload=["torch"])
    with LocalRun(job, tmp_path) as run:
        stuck = run.wait_for(r"round \S+ rank 1 pid (\d+) had 0 begins at 0")[1]
        run.wait_for("stuck at 10$")
        run.wait_for(rf"process {stuck} has not left its function .* its state is copied to the memory of the pod")
        found: dict[str, tuple[str, str, str]] = {}
        while len(found) < 2:
            match = run.wait_for(r"rank (\d) pid (\d+) had \d+ begins at (\d+) weight (\S+)")
            found[match[1]] = match[2], match[3], match[4]
        assert found["1"][0] != stuck, "it was replaced"
        assert {each[1:] for each in found.values()} == {("10", "10.0")}
        assert run.exit_code(120) == 0, run.text
