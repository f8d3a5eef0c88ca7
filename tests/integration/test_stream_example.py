"""The stream example: each record is trained once an epoch, and the learning rate follows the world size."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from support.common.processes import agent_over
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "stream" / "train.py"
EPOCHS, SAMPLES, BATCH = 2, 241, 4
"""In the last step of an epoch that is not disturbed, one rank has a sample and the others have none."""
LINE = re.compile(r"step=(\d+) epoch=(\d+) lr=([\d.]+) world=(\d+) rank=\d+ pid=(\d+) records=([\d,]+)$", re.MULTILINE)


class Step(NamedTuple):
    """A step as one rank printed it, with the records of all ranks."""

    step: int
    epoch: int
    lr: float
    world: int
    pid: int
    records: tuple[int, ...]


def printed(output: str) -> list[Step]:
    return [
        Step(int(step), int(epoch), float(lr), int(world), int(pid), tuple(map(int, records.split(","))))
        for step, epoch, lr, world, pid, records in LINE.findall(output)
    ]


def test_a_killed_worker_and_a_drained_node_cost_no_record_and_repeat_none(tmp_path: Path) -> None:
    """No commit is made. The process that replaces the killed one gets its position in the stream from the others."""
    command = [sys.executable, str(EXAMPLE), f"--epochs={EPOCHS}", f"--samples={SAMPLES}", f"--batch={BATCH}"]
    job = manifest(
        [*command, "--step-delay=0.05"], replicas=3, preload=["torch", "torch._dynamo"],
        elasticPolicy={"minReplicas": 2, "maxReplicas": 3}, failurePolicy={"maxRestarts": 5},
    )  # fmt: skip
    with LocalRun(job, tmp_path) as run:
        found = [run.wait_for(r"step=4 .*world=3 rank=(\d) pid=(\d+)") for _ in range(3)]
        ranks = {match[1]: match[2] for match in found}
        os.kill(int(ranks["1"]), signal.SIGKILL)
        new = run.wait_for(rf"step=(\d+) .*world=3 rank=\d pid=(?!({'|'.join(ranks.values())}) )")
        assert 4 < int(new[1]) < SAMPLES // (3 * BATCH), "in the middle of the epoch"
        os.kill(agent_over(int(ranks["2"])), signal.SIGTERM)
        run.wait_for(r"step=\d+ .*world=2 ")
        assert run.exit_code() == 0, run.text
    lines = printed(run.text)

    for pid in {line.pid for line in lines}:
        own = [line.step for line in lines if line.pid == pid]
        assert all(after >= before for before, after in pairwise(own)), f"{pid} has lost steps: {own}"
    # A step that the killed worker alone had completed was done again: its last line counts.
    steps = {line.step: line for line in lines}
    assert sorted(steps) == list(range(1, max(steps) + 1))
    trained = Counter((line.epoch, record) for line in steps.values() for record in line.records)
    assert trained == Counter((epoch, record) for epoch in range(EPOCHS) for record in range(SAMPLES))

    assert {line.world for line in lines} == {2, 3}
    for line in lines:
        assert line.lr == pytest.approx(0.01 * 0.99 ** (line.step - 1) * line.world / 2, abs=1e-6)
