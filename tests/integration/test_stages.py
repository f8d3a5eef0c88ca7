"""Launchers that follow each other in a command: a finished one never runs again, whatever ends in the next one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from support.common.processes import child_with
from support.local.partition import agent_of
from support.local.run import LocalRun, manifest

FIRST = "import os; print('first', os.environ['RANK'], flush=True)"
SECOND = """
import os, pathlib, time
print("second", os.environ["RANK"], "pid", os.getpid(), flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""
COMMAND = "echo before; torchrun first.py && echo between && torchrun second.py && echo after"


def lines(job: LocalRun, text: str) -> list[str]:
    return [line.split("]:", 1)[1] for line in job.text.splitlines() if "]:" in line and text in line]


def test_a_finished_launcher_never_runs_again(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(FIRST)
    (tmp_path / "second.py").write_text(SECOND)
    job = manifest(["bash", "-c", COMMAND], replicas=2, nprocPerNode=2, preload=["json"], stopGraceSeconds=0)
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [  # type: ignore[index]
        {"name": "PATH", "value": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    ]
    with LocalRun(job, tmp_path) as run:
        second = [run.wait_for(r"second (\d) pid (\d+)") for _ in range(4)]
        rank_1 = next(int(line[2]) for line in second if line[1] == "1")
        os.kill(rank_1, signal.SIGKILL)  # only its stage starts again, below the commands that wait
        for _ in range(4):
            run.wait_for(r"second (\d) pid (\d+)")
        assert len(lines(run, "between")) == 2, run.text

        os.kill(agent_of(1, run.pid), signal.SIGKILL)  # the pod that takes its place passes the first launcher
        run.wait_for("launcher 1 of the command ends at once")
        for _ in range(2):
            run.wait_for(r"second [23] pid")

        os.kill(child_with("store"), signal.SIGKILL)  # the next one learns from the agents what is finished
        run.wait_for("starting it again")
        run.wait_for(r"round \S+ runs")
        os.kill(agent_of(1, run.pid), signal.SIGKILL)
        run.wait_for("launcher 1 of the command ends at once")
        for _ in range(2):
            run.wait_for(r"second [23] pid")
        (tmp_path / "go").touch()
        assert run.exit_code() == 0, run.text
    assert sorted(lines(run, "first")) == [f"first {rank}" for rank in range(4)], run.text
    assert len(lines(run, "before")) == 4, run.text  # once in each pod
    assert len(lines(run, "after")) == 2, run.text
