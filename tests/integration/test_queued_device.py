"""In-process restart on a device that works behind the host: no result of a broken collective is kept.

`support.training.queued_device` is the device. Gradients are small integers, so each step's weights are known exactly.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

RANKS = 3

TRAINS = """
import os, sys, time
sys.path.insert(0, os.environ["TESTS"])
import torch
import torch.distributed as dist
import elasticjob
from support.training import queued_device

folder, mode = sys.argv[1:3]
device = queued_device.install(folder)
if mode == "late":
    # Rank 2 learns of the end of a round later than the others.
    from elasticjob._runtime.contract.restart_messages import Interrupt
    from elasticjob.inprocess._restartable.agent_channel import AgentChannel
    receive = AgentChannel.receive
    def receive_late(channel):
        message = receive(channel)
        if isinstance(message, Interrupt) and os.environ["RANK"] == "2":
            time.sleep(0.3)
        return message
    AgentChannel.receive = receive_late
weights = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
module = torch.nn.Module()
module.weights = weights
optimizer = queued_device.QueuedSGD(module.parameters())
state = elasticjob.State(module=module, optimizer=optimizer, step=0)

def part(step, rank, world):
    # What a rank adds in a step; the sum over all ranks is the same whatever their number is.
    return float(sum((step * 7 + item * 5) % 11 for item in range(12)[rank::world]))

def expected(step):
    return -sum(part(s, 0, 1) for s in range(step))

def make_step(group):
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    weights.grad = gradient = torch.empty_like(weights)
    value = part(state.step, rank, world)
    device.launch(lambda: gradient.fill_(value))
    dist.all_reduce(gradient, group=group)
    CHANGE

@elasticjob.restartable
def train():
    dist.init_process_group("gloo")
    group = dist.new_group(backend="queued")
    had = state.step
    state.sync()
    device.synchronize()
    error = (weights.detach() - expected(state.step)).abs().max().item()
    rank = dist.get_rank()
    print(f"CHECK rank {rank} pid {os.getpid()} begins at {state.step} had {had} error {error:g}\\n",
          end="", flush=True)
    begin = state.step
    if begin == 0:
        state.commit()
    while not os.path.exists(os.path.join(folder, "done")):
        make_step(group)
        if state.step == begin + 5:
            print(f"RUNS rank {rank}\\n", end="", flush=True)
        if mode == "item" and rank == 0:
            device.synchronize()
        if mode == "late" and rank == 0 and os.path.exists(os.path.join(folder, "fail-0")):
            os.unlink(os.path.join(folder, "fail-0"))
            # Its collective fails, and it leaves the function before it learns of the end of the round.
            open(os.path.join(folder, "raise-1"), "w").close()
            raise dist.DistBackendError("Connection closed by peer")
        if os.path.exists(os.path.join(folder, f"raise-{rank}")):
            os.unlink(os.path.join(folder, f"raise-{rank}"))
            raise ValueError("bad batch")

train()
dist.destroy_process_group()
"""

CHANGES = {
    "assignment": """
    optimizer.step()
    state.step += 1
    elasticjob.progress(state.step)
""",
    "update": """
    with state.update():
        optimizer.step()
""",
    "by hand": """
    with state.update():
        device.launch(lambda: weights.data.sub_(gradient))
""",
}
MORE_DEVICES = [("assignment", "ahead"), ("update", "ahead"), ("assignment", "item")]


class Job:
    """Three ranks that train; each round is checked."""

    def __init__(self, run: LocalRun, folder: Path) -> None:
        self._run, self._folder = run, folder
        self.processes: dict[int, int] = {}
        self.begin = 0

    def next_round(self) -> None:
        """Wait until all ranks have begun a round: with the right weights, and all at one step."""
        found: dict[int, re.Match[str]] = {}
        while len(found) < RANKS:
            match = self._run.wait_for(r"CHECK rank (\d) pid (\d+) begins at (\d+) had (\d+) error (\S+)")
            found[int(match[1])] = match
        assert {match[5] for match in found.values()} == {"0"}, self._run.text
        steps = {int(match[3]) for match in found.values()}
        assert len(steps) == 1, "the ranks begin at different steps"
        assert steps.pop() >= self.begin
        self.begin = int(found[0][3])
        self.processes = {rank: int(match[2]) for rank, match in found.items()}
        self._run.wait_for("RUNS rank")

    def let_collective_fail(self) -> None:
        """Let rank 1 raise, and a collective of rank 0 fail because of that."""
        (self._folder / "fail-0").touch()

    def end(self) -> None:
        (self._folder / "done").touch()

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank], signal.SIGKILL)

    def let_raise(self, rank: int) -> None:
        (self._folder / f"raise-{rank}").touch()


@pytest.fixture
def job(tmp_path: Path, change: str, mode: str) -> Iterator[Job]:
    text = TRAINS.replace("CHANGE", CHANGES[change].strip())
    command = ["env", f"TESTS={Path(__file__).parents[1]}", *script(tmp_path, text), str(tmp_path), mode]
    made = manifest(command, replicas=RANKS, preload=["torch"], failurePolicy={"maxRestarts": 100})
    with LocalRun(made, tmp_path) as run:
        yield Job(run, tmp_path)


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        ("by hand", "ahead"),
        ("assignment", "late"),
        *(pytest.param(change, mode, marks=pytest.mark.deep) for change, mode in MORE_DEVICES),
    ],
)
def test_survivors_of_a_kill_have_the_right_weights(job: Job, change: str, mode: str) -> None:
    """The others' queues hold an all-reduce that ends with part of the sum, and an optimizer's step behind it."""
    job.next_round()
    for kill in range(3):
        before, reached = job.processes, job.begin
        job.kill(kill)
        job.next_round()
        assert {rank for rank in range(RANKS) if job.processes[rank] == before[rank]} == {*range(RANKS)} - {kill}
        assert job.begin >= reached + 4, "steps that were done are lost"
    job.end()


@pytest.mark.parametrize(
    ("change", "mode"), [("assignment", "ahead"), pytest.param("assignment", "late", marks=pytest.mark.deep)]
)
def test_all_processes_keep_the_right_weights_if_one_raises(job: Job, change: str, mode: str) -> None:
    job.next_round()
    for rank in (1, 0):
        before, reached = job.processes, job.begin
        job.let_raise(rank)
        job.next_round()
        assert job.processes == before
        assert job.begin >= reached + 4
    job.end()


@pytest.mark.parametrize(("change", "mode"), [("assignment", "late")])
def test_a_rank_whose_collective_fails_first_waits_for_the_others_too(job: Job, change: str, mode: str) -> None:
    """It is out of its function when it learns of the end of the round."""
    job.next_round()
    for _ in range(2):
        before, reached = job.processes, job.begin
        job.let_collective_fail()
        job.next_round()
        assert job.processes == before
        assert job.begin >= reached + 4
    job.end()
