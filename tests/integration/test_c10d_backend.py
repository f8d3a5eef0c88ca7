"""`spec.rendezvous.backend: c10d`: the command is a stock torchrun, on the job's store."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local_run import LocalRun, manifest
from support.torchrun import WORKER, script

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
pytest.importorskip("torch")

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SPEC: dict[str, Any] = {"rendezvous": {"backend": "c10d"}, "preload": ["torch", "torch._dynamo"], "nprocPerNode": 2}


def trains(run: LocalRun, world: int, ranks: int) -> dict[str, int]:
    """Wait until that many ranks train in a world of that size: their process ids."""
    found: dict[str, int] = {}
    while len(found) < ranks:
        match = run.wait_for(rf"trains (\d+) {world} \d+ \d+ (\d+)", timeout=120)
        found[match[1]] = int(match[2])
    return found


def test_a_worker_of_a_stock_torchrun_is_killed_and_the_job_recovers_each_time(tmp_path: Path) -> None:
    job = manifest([TORCHRUN, *script(tmp_path)], replicas=2, **SPEC)
    with LocalRun(job, tmp_path) as run:
        for restarts in range(2):
            ranks = trains(run, 4, 4)
            victim = str(3 * restarts)
            os.kill(ranks[victim], signal.SIGKILL)
            run.wait_for(rf"WorkerFailed: rank {victim} died: SIGKILL .*counts as a restart")
        trains(run, 4, 4)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 2 restarts" in run.text


def test_a_lost_node_is_not_counted_and_a_worker_that_raises_is_named(tmp_path: Path) -> None:
    raises = WORKER + "if os.environ['RANK'] == '1': raise ValueError('bad batch')\n"
    (tmp_path / "raises.py").write_text(raises)
    job = manifest(
        [TORCHRUN, str(tmp_path / "raises.py"), str(tmp_path / "done")],
        elasticPolicy={"minReplicas": 1, "maxReplicas": 2},
        failurePolicy={"maxRestarts": 0},
        **SPEC,
    )
    with LocalRun(job, tmp_path) as run:
        ranks = trains(run, 4, 4)
        os.kill(parent(parent(ranks["3"])), signal.SIGKILL)
        run.wait_for(r"round 1.0.1 ended: AgentLost: toy-\d-0 lost$")
        run.wait_for("round 1.0.2 runs")
        (tmp_path / "done").touch()
        assert run.exit_code(120) == 1
    assert "toy failed: rank 1 died: ValueError: bad batch (exit 1, UserError)" in run.text
    assert "; 0 restarts" in run.text


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
