"""`elasticjob.State` with real torch: in one process, between ranks, and across the rounds of a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
EXAMPLE = Path(__file__).parents[2] / "examples" / "state" / "train.py"

ALONE = """
import sys, torch, elasticjob
from torch.utils.data import DistributedSampler

def make(**values):
    torch.manual_seed(values.get("step", 0))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=values.pop("lr", 0.1))
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)
    state = elasticjob.State(model=model, optimizer=optimizer, sampler=sampler, path=sys.argv[1], **values)
    return model, optimizer, sampler, state

model, optimizer, sampler, state = make(step=4, best=(1.5, None), seen={1: [True, "x"]}, mask=torch.ones(0, 2))
model(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
sampler.set_epoch(3)
state.step += 1
state.save()

model2, optimizer2, sampler2, state2 = make(step=0, best=None, seen={}, mask=None, lr=9.0)
state2.sync()
assert (state2.step, state2.best, state2.seen, sampler2.epoch) == (5, (1.5, None), {1: [True, "x"]}, 3)
assert state2.mask.shape == (0, 2)
for a, b in zip(model.state_dict().values(), model2.state_dict().values(), strict=True):
    assert a.dtype == b.dtype and torch.equal(a, b)
assert optimizer2.param_groups[0]["lr"] == 0.1
for a, b in zip(optimizer.state.values(), optimizer2.state.values(), strict=True):
    assert all(torch.equal(a[k], b[k]) for k in a)
state2.best = object()
try:
    state2.commit()
except TypeError as error:
    print(error)
"""


def test_a_state_is_restored_from_a_file(tmp_path: Path) -> None:
    output = subprocess.check_output(
        [sys.executable, "-c", ALONE, str(tmp_path / "state")], text=True, env=environment()
    )
    assert output.strip() == (
        "State: best: objects of type object cannot be part of a State: "
        "write numbers, text, lists, dicts and tensors, or give the type state_dict and load_state_dict"
    )


BETWEEN = """
import os, sys, torch, elasticjob
import torch.distributed as dist
from elasticjob.training import progress_channel
from elasticjob.training.progress_channel import ChannelState

rank = int(os.environ["RANK"])
progress_channel.channel.state = ChannelState.NO_AGENT
progress_channel.channel.memory = tuple(os.memfd_create("agent") for _ in range(3))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=4)
model = torch.nn.Linear(300, 300)
state = elasticjob.State(model=model, step=0, note="")
if rank < 2:  # rank 1 is a step ahead of rank 0, the others have just joined
    state.step, state.note = 10 + rank, f"from {rank}"
    with torch.no_grad():
        model.weight.fill_(rank)
    state.commit()
state = elasticjob.State(model=model, step=0, note="")  # as in the next process of this rank
state.sync()
print(rank, state.step, state.note, model.weight.unique().tolist())
dist.destroy_process_group()
"""


def test_all_ranks_get_the_newest_state_of_any_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BETWEEN)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "rendezvous")],
            env=environment(RANK=rank, LOCAL_RANK=int(rank == 3)),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    assert [process.communicate(timeout=100)[0].strip() for process in ranks] == [
        f"{rank} 11 from 1 [1.0]" for rank in range(4)
    ]


def environment(**more: object) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def example(folder: Path, *arguments: str, **spec: object) -> dict[str, object]:
    command: Sequence[str] = [sys.executable, str(EXAMPLE), *arguments]
    policy = {"minReplicas": 2, "maxReplicas": 3}
    preload = ["torch", "torch._dynamo"]
    return manifest(command, replicas=3, elasticPolicy=policy, preload=preload, **spec)  # type: ignore[arg-type]


def steps_of(text: str, rank: int) -> list[tuple[int, int]]:
    """Return each (step, world size) that a rank printed."""
    return [(int(s), int(w)) for s, w in re.findall(rf"step=(\d+) .* world=(\d) rank={rank} ", text)]


def test_no_step_is_lost_or_repeated_when_a_node_is_drained_and_replaced(tmp_path: Path) -> None:
    saved = tmp_path / "state"
    job = example(tmp_path, "--steps=100000", "--step-delay=0.01", f"--path={saved}")
    with LocalRun(job, tmp_path) as run:
        run.wait_for(r"step=10 .* world=3 rank=2 ", 200)
        os.kill(agent_of(run, "toy-2-0"), signal.SIGTERM)
        run.wait_for(rf"toy-2-0: training state saved to {saved}")
        run.wait_for(r"world=2 rank=1 ")
        step = int(run.wait_for(r"step=(\d+) .* world=3 rank=2 ", 200)[1])
        run.wait_for(rf"step={step + 10} ")
        run.signal(signal.SIGINT)
        assert run.exit_code() == 130
    for rank in (0, 1):
        steps = [step for step, _ in steps_of(run.text, rank)]
        assert steps == list(range(1, len(steps) + 1))
    worlds = [world for _, world in steps_of(run.text, 0)]
    assert [w for i, w in enumerate(worlds) if worlds[i - 1 : i] != [w]] == [3, 2, 3]
    last = steps_of(run.text, 0)[-1][0]
    with LocalRun(job, tmp_path) as again:
        assert int(again.wait_for(r"step=(\d+) ", 200)[1]) == last + 1


def test_a_crash_loses_at_most_the_steps_since_the_last_commit(tmp_path: Path) -> None:
    job = example(tmp_path, "--steps=100000", "--step-delay=0.01", "--commit-every=20")
    with LocalRun(job, tmp_path) as run:
        run.wait_for(r"step=50 .* world=3 rank=1 ", 200)
        os.kill(worker_of(run, "toy-1-0"), signal.SIGKILL)
        run.wait_for(r"step=90 ")
        run.signal(signal.SIGINT)
        assert run.exit_code() == 130
    steps = [step for step, _ in steps_of(run.text, 0)]
    (back,) = (i for i, step in enumerate(steps) if i and step != steps[i - 1] + 1)
    assert steps[back] % 20 == 1
    assert 0 <= steps[back - 1] - steps[back] + 1 <= 20


def agent_of(run: LocalRun, pod: str) -> int:
    """Return the process id of this pod's agent: a child of the run, since other runs may have pods of that name."""
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        path = Path("/proc") / child
        try:
            environ, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if f"ELASTICJOB_POD_NAME={pod}\0".encode() in environ and b"\0agent\0--\0" in command:
            return int(child)
    raise AssertionError(f"no agent of {pod} runs")


def worker_of(run: LocalRun, pod: str) -> int:
    """Return the process id of the child of this pod's agent that runs the script."""
    agent = agent_of(run, pod)
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if str(EXAMPLE).encode() in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError(f"no worker of {pod} runs")
