"""A network that parts the nodes of a round: at most one part may write."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from support.common.processes import state_of
from support.local.partition import OWN_NETWORK, Partition
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables")

SIZE = 4
STEPS = """
import itertools, os, sys, time
for step in itertools.count():
    print("step", step, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid(), flush=True)
    time.sleep(0.05)
    if os.path.exists(sys.argv[1]):
        break
"""


def job(folder: Path) -> dict[str, object]:
    (folder / "steps.py").write_text(STEPS)
    command = [sys.executable, str(folder / "steps.py"), str(folder / "done")]
    return manifest(command, replicas=SIZE, elasticPolicy={"minReplicas": 1, "maxReplicas": SIZE})


def workers(run: LocalRun, world_size: int, count: int) -> dict[int, int]:
    """Return the process ids of `count` workers that have just taken a step in a world of this size, by rank."""
    pids = dict[int, int]()
    while len(pids) < count:
        line = run.wait_for(rf"step \d+ rank (\d) of {world_size} pid (\d+)")
        pids[int(line[1])] = int(line[2])
    return pids


def wait_until(pid: int, states: str) -> None:
    """Wait until the process is in one of these states: the kernel handles a signal after `kill` has returned."""
    deadline = time.monotonic() + 10
    while state_of(pid) not in states:
        assert time.monotonic() < deadline, f"{pid} is {state_of(pid)}"


def finish(run: LocalRun, folder: Path) -> None:
    """Wait until all nodes train again, and end the job."""
    run.wait_for(rf"runs: {SIZE} workers on {SIZE} pods")
    workers(run, SIZE, SIZE)
    (folder / "done").touch()
    assert run.exit_code() == 0
    assert "toy succeeded; 0 restarts" in run.text


def test_half_of_a_round_without_the_coordinator_is_frozen_while_the_other_half_trains(tmp_path: Path) -> None:
    """Group rank 0, whose worker writes the checkpoints, is in the half that is cut off."""
    with LocalRun(job(tmp_path), tmp_path, within=OWN_NETWORK) as run:
        run.wait_for(rf"runs: {SIZE} workers on {SIZE} pods")
        before = workers(run, SIZE, SIZE)
        network = Partition(run.pid, SIZE)
        network.cut(0, 1)
        for _ in range(2):
            run.wait_for(r"toy-[01]-0: cut off from the store and from half or more of the round's pods: .* frozen")
        run.wait_for("runs: 2 workers on 2 pods")
        workers(run, 2, 2)
        for rank in (0, 1):
            wait_until(before[rank], "T")
        network.heal()
        finish(run, tmp_path)


def test_more_than_half_of_a_round_trains_on_without_the_coordinator_and_the_rest_waits(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path, within=OWN_NETWORK) as run:
        run.wait_for(rf"runs: {SIZE} workers on {SIZE} pods")
        before = workers(run, SIZE, SIZE)
        network = Partition(run.pid, SIZE)
        network.cut(0, 1, 2)
        run.wait_for("gathering: 3 of 4 worker pods are missing; the operator must confirm that this is the only store")
        for _ in range(20):
            assert workers(run, SIZE, 3) == {rank: before[rank] for rank in (0, 1, 2)}
        assert "runs: 1 worker on 1 pod" not in run.text
        assert "cut off" not in run.text
        network.heal()
        finish(run, tmp_path)
