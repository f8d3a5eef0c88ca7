"""An image that runs stock torchrun itself (`rendezvous.backend: c10d`), whose workers are killed repeatedly."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster.jobs import Job, digits, kubectl
from support.cluster.kube import Json
from support.cluster.logbook import LATE, LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
KILL = """
import os, signal, sys
def ppid(p):
    return int(open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[1])
def words(p):
    return open(f"/proc/{p}/cmdline", "rb").read().split(b"\\0")
def is_worker(p):
    try:
        # A worker is two processes: a child of torchrun, and the process forked in its place by the agent. The agent
        # is the parent of torchrun and of the forks, and the container's first process.
        if b"/app/train.py" not in words(p) or b"torch.distributed.run" in words(p) or p == os.getpid():
            return False
        return ppid(p) == 1 if sys.argv[1] == "fork" else ppid(p) > 1 and ppid(ppid(p)) == 1
    except (OSError, ValueError):
        return False
[worker] = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_worker(p)]
os.kill(worker, signal.SIGKILL)
"""


@pytest.fixture(params=[4, pytest.param(20, marks=pytest.mark.deep)])
def kills(request: pytest.FixtureRequest) -> int:
    """How many workers are killed, one after the other."""
    return int(request.param)


@pytest.mark.timeout(1500)
def test_a_killed_worker_is_recovered_from_every_time(
    submit: Submit, follow: Follow, shared_dir: str, cluster_dir: Path, kills: int
) -> None:
    raw = digits(
        "stock-torchrun", shared_dir, "--epochs", "100000", "--step-delay", "0.05",
        replicas=3, rendezvous={"backend": "c10d"}, failurePolicy={"maxRestarts": kills},
    )  # fmt: skip
    command = raw["spec"]["template"]["spec"]["containers"][0]["command"]
    command[:1] = ["python3", "-m", "torch.distributed.run"]
    job = submit(raw)
    book = follow(job)
    book.wait_step(5, timeout=240)
    seconds = []
    for kill in range(kills):
        round_ = job.wait_status(worldSize=3)["status"]["rendezvousRound"]
        pod = f"{job.name}-{kill % 3}-0"
        which = ("child", "fork")[kill % 2]
        kubectl(cluster_dir, "exec", "-n", job.namespace, pod, "-c", "trainer", "--", "python3", "-c", KILL, which)
        moment = time.time()
        job.wait_world(3, after=round_, timeout=120)
        # Later steps belong to the new world.
        step = book.wait_steps_after(moment + LATE, world=3, timeout=120)
        seconds.append(step.time - moment)
    print(json.dumps({"kills": kills, "median": statistics.median(seconds), "seconds": seconds}))
    status = job.status()
    assert status["restartsCountTowardsMax"] == kills
    failure = status["lastFailure"]
    assert (failure["signal"], failure["class"]) == ("SIGKILL", "Killed")
    assert status["incarnations"] == "0,0,0"
