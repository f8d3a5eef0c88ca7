"""Ranks that hang, with real torch and gloo: the job names them, logs all stacks, and continues to train."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

TIMEOUT = 10

HANGS = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def hangs_here():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, restart, steps = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"], 0
stop = torch.zeros(1)
threading.Thread(target=threading.Event().wait, daemon=True, name="idle").start()
while not stop.item():
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    steps += 1
    if rank == 0:
        stop.fill_(float(os.path.exists(sys.argv[1])))
    dist.broadcast(stop, 0)
    if steps == 5:
        print(f"step 5 rank {rank} pid {os.getpid()} restart {restart} at {time.time():.3f}", flush=True)
    if steps == 6 and rank == 1 and restart == "0":
        hangs_here()
    time.sleep(0.03)
dist.destroy_process_group()
"""
"""Rank 1 of the first round sleeps forever after its sixth step and ignores SIGTERM."""


PAUSES = '''
import os, sys, time
import elasticjob

folder, rank, step = sys.argv[1], os.environ["RANK"], 0

def waits_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)

COLLECTIVE = """
import os, time
def collective(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""
in_torch = {}
exec(compile(COLLECTIVE, "/site-packages/torch/collective.py", "exec"), in_torch)

for step in range(1, 12):
    if rank == "1" and step in (5, 9):
        waits_for(f"after-{step}")
    if rank == "0":
        in_torch["collective"](os.path.join(folder, f"step-{step}"))
    open(os.path.join(folder, f"step-{step}"), "w").close()
    elasticjob.progress(step)
waits_for("done")
'''


def test_a_hang_that_is_only_reported(tmp_path: Path) -> None:
    policy = {"progressTimeoutSeconds": TIMEOUT, "action": "Event"}
    with LocalRun(manifest([*script(tmp_path, PAUSES), str(tmp_path)], replicas=2, hangPolicy=policy), tmp_path) as run:
        for step in (5, 9):
            reported = run.wait_for(r"\[job\] rank 1: (no progress for .*) \(Hang\) on toy-1-0; nothing is restarted")
            assert re.search(rf"after step {step - 1}: main thread is in waits_for", reported[1])
            (tmp_path / f"after-{step}").touch()
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 0 restarts" in run.text
    stacks = re.findall(r"\[agent\] toy-\d-0: rank (\d), [\d.]+ s after step (\d+):", run.text)
    assert {("0", "4"), ("1", "4"), ("0", "8"), ("1", "8")} <= set(stacks)
    assert len(re.findall(r"round \S+ runs", run.text)) == 1


@pytest.mark.torch
def test_a_rank_that_sleeps_for_ever_and_one_that_is_stopped(tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = manifest(
        [*script(tmp_path, HANGS), str(done)],
        replicas=2,
        preload=["torch", "torch._dynamo"],
        hangPolicy={"progressTimeoutSeconds": TIMEOUT},
    )
    with LocalRun(job, tmp_path) as run:
        run.wait_for(r"step 5 rank 1 pid \d+ restart 0", 200)
        cause = run.wait_for(r"round 1.0.1 ended: WorkerFailed: rank (\d): (.*) \(Hang\) \(counts as a restart\)", 60)
        assert cause[1] == "1"
        place = r"main thread is in hangs_here \(.*script.py:\d+\)"
        assert re.search(rf"no progress for [\d.]+ s after step 6: {place}", cause[2])

        stopped = int(run.wait_for(r"step 5 rank 0 pid (\d+) restart 1")[1])
        os.kill(stopped, signal.SIGSTOP)
        cause = run.wait_for(r"round 1.0.2 ended: WorkerFailed: rank (\d): (.*) \(Hang\) \(counts as a restart\)", 60)
        assert cause[1] == "0"
        assert "the process does not respond" in cause[2]

        run.wait_for(r"step 5 rank \d pid \d+ restart 2")
        done.touch()
        assert run.exit_code() == 0, run.text
    assert "toy succeeded; 2 restarts" in run.text
    assert "workers start by exec" not in run.text
    stacks = re.findall(r"\[agent\] (toy-\d)-0: rank (\d), [\d.]+ s after step \d+:", run.text)
    assert sorted(stacks) == [("toy-0", "0"), ("toy-0", "0"), ("toy-1", "1"), ("toy-1", "1")]
    assert run.text.count("in wait") >= 1, "stacks of other threads than the main one are logged too"


DESYNCHRONIZES = """
import os, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
import elasticjob
from elasticjob.inprocess._restartable import timeout_guard

WAIT = '''
import time
def wait(store, keys):
    while not store.check(keys):
        time.sleep(0.01)
'''
in_torch = {}
exec(compile(WAIT, "/site-packages/torch/collective.py", "exec"), in_torch)

class Done(dist._Work):
    def __init__(self, tensors):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(tensors)
    def wait(self, timeout=timedelta(0)):
        return True
    def get_future(self):
        return self.future

class StandIn(torch._C._distributed_c10d.Backend):
    # A backend as nccl: a collective waits for ever, and a watchdog only notes that it is overdue.
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.began, self.calls, self.aborted = store, None, 0, False
        self.timeout = timeout
    @property
    def options(self):
        return SimpleNamespace(_timeout=self.timeout)
    def name(self):
        return "nccl-stand-in"
    def getBackendName(self):
        return self.name()
    def get_error(self):
        began = self.began
        late = began is not None and time.monotonic() > began + self.timeout.total_seconds()
        return ErrorType.TIMEOUT if late else ErrorType.SUCCESS
    def abort(self):
        self.aborted = True
    def allreduce(self, tensors, options):
        self.calls += 1
        self.began = time.monotonic()
        self.store.set(f"{self.calls}/{self.rank()}", str(tensors[0].item()))
        keys = [f"{self.calls}/{rank}" for rank in range(self.size())]
        in_torch["wait"](self.store, keys)
        self.began = None
        tensors[0].fill_(sum(float(self.store.get(key)) for key in keys))
        return Done(tensors)

made = []

def create(store, rank, size, timeout):
    made.append(StandIn(store, rank, size, timeout))
    return made[-1]

dist.Backend.register_backend("standin", create, devices=["cpu"])
calls = 0

def hangs_here():
    time.sleep(3600)

@elasticjob.restartable
def train():
    global calls
    calls += 1
    dist.init_process_group("standin", timeout=timedelta(seconds=3))
    rank, total = dist.get_rank(), torch.zeros(1)
    for step in range(1, 6):
        total.fill_(float(rank))
        dist.all_reduce(total)
        assert total.item() == 1.0, total
        if sys.argv[2:]:
            elasticjob.progress(step)
        if step == 3 and rank == 1 and calls == 1:
            hangs_here()
    print(f"call {calls} rank {rank} pid {os.getpid()}", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    dist.destroy_process_group()

print(f"starts pid {os.getpid()} rank {os.environ['RANK']}", flush=True)
train()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        pytest.param({}, [], id="none"),
        pytest.param(
            {"hangPolicy": {"progressTimeoutSeconds": 600}}, ["steps"], id="hangPolicy", marks=pytest.mark.deep
        ),
    ],
)
def test_a_rank_that_does_not_enter_a_collective_ends_the_round_without_a_hang_policy(
    policy: dict[str, Any], steps: list[str], tmp_path: Path
) -> None:
    """torch would have ended the process by the group's time-out of 3 s; the function is called again instead.

    A hangPolicy is the user's choice, which the guard does not replace.
    """
    done = tmp_path / "done"
    job = manifest([*script(tmp_path, DESYNCHRONIZES), str(done), *steps], replicas=2, preload=["torch"], **policy)
    with LocalRun(job, tmp_path) as run:
        pids = {rank: pid for pid, rank in (run.wait_for(r"starts pid (\d+) rank (\d)", 100).groups() for _ in "01")}
        if policy:
            run.wait_for(r"rank 0: a collective of process group \S+ has exceeded its time-out of 3 s")
            run.wait_for(r"the round goes on: spec.hangPolicy decides")
            assert "hang guard" not in run.text
            return
        run.wait_for(
            r"hang guard: a collective that exceeds torch's time-out \(3 s\) ends the round; set hangPolicy", 60
        )
        cause = run.wait_for(r"round 1.0.1 ended: WorkerFailed: rank (\d): (.*) \(Hang\) \(counts as a restart\)", 60)
        assert cause[1] == "1"
        assert "main thread is in hangs_here" in cause[2]
        assert "a collective has exceeded its time-out (3 s, torch's, because spec.hangPolicy is not set)" in cause[2]
        again = {m[1]: m[2] for m in (run.wait_for(r"call 2 rank (\d) pid (\d+)", 60) for _ in "01")}
        assert again == pids, "all processes stay"
        done.touch()
        assert run.exit_code() == 0, run.text
    assert "toy succeeded; 1 restart" in run.text


@pytest.mark.torch
def test_an_overdue_collective_before_the_first_step_ends_the_round_with_a_hang_policy_too(tmp_path: Path) -> None:
    """The policy watches ranks from their first step on, and torch's own time-out is off."""
    policy: dict[str, Any] = {"hangPolicy": {"progressTimeoutSeconds": 600}}
    command = [*script(tmp_path, DESYNCHRONIZES), str(tmp_path / "done")]
    with LocalRun(manifest(command, replicas=2, preload=["torch"], **policy), tmp_path) as run:
        assert "main thread is in hangs_here" in run.wait_for(r"round 1.0.1 ended: WorkerFailed: (.*) \(Hang\)", 100)[1]
        run.wait_for(r"call 2 rank 0")
