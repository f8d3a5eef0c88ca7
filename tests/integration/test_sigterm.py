"""Workers that handle SIGTERM have the time to save at every planned end; workers that do not end at once."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest
from support.local.terminal import Terminal

SAVES = """
import os, pathlib, signal, sys, time

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]

def save(*_):
    print("saving rank", rank, "of", world, flush=True)
    time.sleep(float(sys.argv[2]))
    print("saved rank", rank, "of", world, flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("began rank", rank, "of", world, "agent", os.getppid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
"""Saves for as long as its second argument says; ends well once the file of its first argument exists."""
PLAIN = 'print("began rank", __import__("os").environ["RANK"], flush=True)\nwhile True: __import__("time").sleep(1)'
SAVE_SECONDS = 2.0
"""More than `stopGraceSeconds`, which is 1 by default."""


def saving(folder: Path, seconds: float = SAVE_SECONDS, **spec: Any) -> dict[str, object]:
    return manifest([*script(folder, SAVES), str(folder / "done"), str(seconds)], **spec)


def agents(run: LocalRun) -> dict[int, int]:
    """Wait until the workers of two nodes have begun; return the process ids of their agents by rank."""
    began = [run.wait_for(r"began rank (\d) of 2 agent (\d+)") for _ in range(2)]
    return {int(match[1]): int(match[2]) for match in began}


def saved(text: str) -> list[str]:
    """Return rank and world size, as "rank R of N", of all workers that have saved."""
    return sorted(re.findall(r"saved (rank \d of \d)", text))


BOTH = ["rank 0 of 2", "rank 1 of 2"]


def test_all_workers_save_when_the_job_scales_down(tmp_path: Path) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 2}
    with Terminal(tmp_path, saving(tmp_path, replicas=2, elasticPolicy=policy)) as terminal:
        for _ in range(2):
            terminal.wait_for(r"began rank \d of 2")
        terminal.press("-")
        terminal.wait_for("began rank 0 of 1")
        (tmp_path / "done").touch()
        terminal.wait_for("toy succeeded; 0 restarts")
        assert terminal.exit_code() == 0
    assert saved(terminal.screen) == BOTH


def test_the_workers_of_a_drained_node_and_of_those_that_stay_save(tmp_path: Path) -> None:
    with LocalRun(saving(tmp_path, replicas=2, elasticPolicy={"minReplicas": 1, "maxReplicas": 2}), tmp_path) as run:
        os.kill(agents(run)[1], signal.SIGTERM)
        for _ in range(2):
            run.wait_for(r"saved rank \d of 2")
        assert saved(run.text) == BOTH
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 0 restarts" in run.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_workers_save_when_the_run_is_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    with LocalRun(saving(tmp_path, replicas=2), tmp_path) as run:
        agents(run)
        run.signal(number)
        assert run.exit_code() == 130
    assert saved(run.text) == BOTH


def test_leaving_nodes_whose_store_does_not_answer_save(tmp_path: Path) -> None:
    """When a job is deleted, its store may end before its agents receive their signals."""
    with LocalRun(saving(tmp_path, replicas=2), tmp_path) as run:
        leaving, store = agents(run), child_of(run.pid, "store")
        os.kill(store, signal.SIGSTOP)
        try:
            for agent in leaving.values():
                os.kill(agent, signal.SIGTERM)
            for _ in range(2):
                run.wait_for(r"saved rank \d of 2")
        finally:
            os.kill(store, signal.SIGCONT)
    assert saved(run.text) == BOTH


def child_of(parent: int, program: str) -> int:
    """Return the process id of the child of `parent` whose last argument is `program`."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1].decode() == program:
            return int(child)
    raise AssertionError(f"process {parent} has no child {program}")


def test_workers_do_not_outlive_the_grace_period_of_their_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICJOB_POD_GRACE_SECONDS", "3")
    with LocalRun(saving(tmp_path, seconds=600, replicas=1), tmp_path) as run:
        run.wait_for("began rank 0")
        run.signal(signal.SIGINT)
        assert run.exit_code(timeout=60) == 130
    assert "saving rank 0" in run.text
    assert "done: Left" in run.text


def test_workers_without_a_handler_end_at_once(tmp_path: Path) -> None:
    with LocalRun(manifest(script(tmp_path, PLAIN), replicas=1, stopGraceSeconds=600), tmp_path) as run:
        run.wait_for("began rank 0")
        run.signal(signal.SIGINT)
        assert run.exit_code(timeout=60) == 130
    assert "done: Left" in run.text


ASKS = """
import os, signal, time
import elasticjob

def end(*_):
    print("rank", os.environ["RANK"], "has", elasticjob.deadline(), "to save", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
assert elasticjob.deadline() is None
print("began rank", os.environ["RANK"], "of 2 agent", os.getppid(), flush=True)
while elasticjob.deadline() is None:
    time.sleep(0.01)
time.sleep(60)
"""


def test_a_script_knows_the_time_that_a_drain_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICJOB_POD_GRACE_SECONDS", "20")
    policy = {"minReplicas": 1, "maxReplicas": 2, "gracefulShutdownSeconds": 50}
    with LocalRun(manifest(script(tmp_path, ASKS), replicas=2, elasticPolicy=policy), tmp_path) as run:
        os.kill(agents(run)[1], signal.SIGTERM)
        found = [run.wait_for(r"rank (\d) has (\S+) to save") for _ in range(2)]
        seconds = {match[1]: float(match[2]) for match in found}
    assert 10 < seconds["1"] <= 20, "what the pod of the drained node has"
    assert 30 < seconds["0"] <= 50, "what the planned end leaves the other node"


READS_TO_SAVE = """
import os, signal, subprocess, sys
from torch.utils.data import DataLoader

logger = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))

def endless():
    loader = DataLoader(range(64), num_workers=2, pin_memory=True, persistent_workers=sys.argv[1] == "persistent")
    while True:
        yield from loader

batches = endless()
next(batches)
print("began agent", os.getppid(), flush=True)
while not asked:
    next(batches)
for _ in range(200):
    next(batches)
logger.stdin.write(b"saved and logged\\n")
logger.stdin.flush()
print(logger.stdout.readline().decode(), flush=True)
logger.kill()
"""
"""Reads batches and logs after SIGTERM too: it saves at the end of its epoch."""


@pytest.mark.torch
@pytest.mark.parametrize("workers", ["persistent", "new in each epoch"])
def test_workers_of_a_data_loader_go_on_until_the_script_has_saved(tmp_path: Path, workers: str) -> None:
    job = manifest([*script(tmp_path, READS_TO_SAVE), workers])
    with LocalRun(job, tmp_path) as run:
        agent = int(run.wait_for(r"began agent (\d+)", 120)[1])
        os.kill(agent, signal.SIGTERM)
        run.wait_for("saved and logged", 60)
    assert "killed by signal" not in run.text
    assert "exited unexpectedly" not in run.text
