"""Planned ends of rounds: nodes leave, join and are scaled down, and no step is lost or repeated."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local.run import LocalRun, manifest
from support.local.terminal import Terminal

REPORTS = """
import os, sys, time
import elasticjob

folder, rank = sys.argv[1], os.environ["RANK"]
saved = os.path.join(folder, "saved")
step = int(open(saved).read()) if os.path.exists(saved) else 0

def save():
    if rank == "0":
        with open(saved, "w") as file:
            file.write(str(step))

elasticjob.on_stop(save)
elasticjob.progress(step)
# As with collectives, no rank makes a step before all ranks have started.
mine = os.path.join(folder, os.environ["ELASTICJOB_ROUND"] + "-rank-")
open(mine + rank, "w").close()
while not all(os.path.exists(mine + str(other)) for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.005)
while not os.path.exists(os.path.join(folder, "done")):
    step += 1
    print("did", step, "rank", rank, "of", os.environ["WORLD_SIZE"], "agent", os.getppid(), flush=True)
    elasticjob.progress(step)
    time.sleep(0.01)
"""


def reporting(folder: Path, **spec: Any) -> dict[str, object]:
    (folder / "script.py").write_text(REPORTS)
    return manifest([sys.executable, str(folder / "script.py"), str(folder)], **spec)


def steps_of(text: str, rank: int) -> list[int]:
    return [int(step) for step in re.findall(rf"did (\d+) rank {rank} ", text)]


def test_a_drained_node_and_its_replacement_lose_no_step(tmp_path: Path) -> None:
    job = reporting(tmp_path, replicas=3, elasticPolicy={"minReplicas": 2, "maxReplicas": 3})
    with LocalRun(job, tmp_path) as run:
        agent = int(run.wait_for(r"did \d+ rank 2 of 3 agent (\d+)")[1])
        os.kill(agent, signal.SIGTERM)
        run.wait_for("done: Left")
        run.wait_for(r"did \d+ rank 1 of 2")
        run.wait_for(r"did \d+ rank 2 of 3")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    for rank in (0, 1):
        steps = steps_of(run.text, rank)
        assert steps == list(range(1, len(steps) + 1))
    assert len(re.findall(r"toy-0-0: round \S+ ends after step \d+", run.text)) == 2
    assert "toy succeeded; 0 restarts" in run.text


LEAVES_A_FILE_OPEN = """
import atexit, os, sys
file = open(os.path.join(sys.argv[1], f"left-{os.environ['ELASTICJOB_ROUND']}-{os.environ['RANK']}"), "w")
file.write("left open")
atexit.register(print, "bye", os.environ["RANK"])
"""


@pytest.mark.parametrize("preload", [[], ["json"]], ids=["exec", "fork"])
def test_workers_that_stop_as_planned_flush_and_run_exit_functions(tmp_path: Path, preload: list[str]) -> None:
    job = reporting(tmp_path, replicas=2, preload=preload, elasticPolicy={"minReplicas": 1, "maxReplicas": 2})
    (tmp_path / "script.py").write_text(LEAVES_A_FILE_OPEN + REPORTS)
    with LocalRun(job, tmp_path) as run:
        agent = int(run.wait_for(r"did \d+ rank 1 of 2 agent (\d+)")[1])
        os.kill(agent, signal.SIGTERM)
        run.wait_for("done: Left")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert {"bye 0", "bye 1"} <= set(re.findall(r"bye \d", run.text))
    assert [path.read_text() for path in tmp_path.glob("left-1.0.1-*")] == ["left open"] * 2


@pytest.mark.parametrize("spares", [0, 1])
def test_scaling_up_and_down_loses_no_step(tmp_path: Path, spares: int) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 3, "spares": spares}
    with Terminal(tmp_path, reporting(tmp_path, replicas=2, elasticPolicy=policy)) as terminal:
        terminal.wait_for(r"did \d+ rank 0 of 2 ")
        terminal.press("+")
        terminal.wait_for(r"did \d+ rank 0 of 3 ")
        for _ in range(2):
            terminal.press("-")
        terminal.wait_for(r"did \d+ rank 0 of 1 ")
        (tmp_path / "done").touch()
        terminal.wait_for("toy succeeded; 0 restarts")
        assert terminal.exit_code() == 0
    steps = steps_of(terminal.screen, 0)
    assert steps == list(range(1, len(steps) + 1))
