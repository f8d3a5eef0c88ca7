"""The recipe of docs/run/frameworks.md for TensorBoard: no step appears twice, however often the writer has changed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
pytest.importorskip("tensorboard")

STEPS = 40
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
import elasticjob

folder, steps, keeps_process = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elasticjob.State(model=model, optimizer=optimizer)

def train_step():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 1)).sum()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    time.sleep(0.1)
    return loss.item()

def train():
    dist.init_process_group("gloo")
    state.sync()
    writer = None
    if dist.get_rank() == 0:
        writer = SummaryWriter(folder, purge_step=state.step)
    try:
        while state.step < steps:
            loss = train_step()
            if writer is not None:
                writer.add_scalar("loss", loss, state.step)
                writer.flush()
            state.step += 1
            if state.step % 7 == 0:
                state.commit()
            print("rank", dist.get_rank(), "pid", os.getpid(), "done", state.step, "\\\\n", end="", flush=True)
            elasticjob.progress(state.step)
    finally:
        if writer is not None:
            writer.close()
    dist.destroy_process_group()

if keeps_process:
    train = elasticjob.restartable(train)
train()
"""


@pytest.mark.parametrize(
    "keeps_process",
    [pytest.param(True, id="restartable"), pytest.param(False, id="processes", marks=pytest.mark.deep)],
)
def test_each_step_is_shown_once(keeps_process: bool, tmp_path: Path) -> None:
    """The process of rank 0 is killed, then that of rank 1, so that the writer is opened in the same process again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, program = tmp_path / "events", tmp_path / "train.py"
    program.write_text(SCRIPT.replace("\\\\", "\\"))
    job = manifest([sys.executable, str(program), str(events), str(STEPS), str(keeps_process)], replicas=2,
                   failurePolicy={"maxRestarts": 5})  # fmt: skip
    with LocalRun(job, tmp_path) as run:
        os.kill(int(run.wait_for(r"rank 0 pid (\d+) done 10 ", 120)[1]), signal.SIGKILL)
        os.kill(int(run.wait_for(r"rank 1 pid (\d+) done 25 ", 120)[1]), signal.SIGKILL)
        assert run.exit_code(120) == 0, run.text
    files = list(events.iterdir())
    assert len(files) == 3, run.text
    pids = re.findall(r"rank 0 pid (\d+) done (?:2|20|39) ", run.text)
    assert len(set(pids)) == (2 if keeps_process else 3)
    shown = EventAccumulator(str(events))
    shown.Reload()
    steps = [event.step for event in shown.Scalars("loss")]
    assert steps == sorted(set(steps)), "no step is shown twice"
    assert len({*range(STEPS)} - {*steps}) <= 1, "only the step in which rank 0 was killed may be missing"
