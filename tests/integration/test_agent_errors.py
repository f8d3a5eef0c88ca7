"""An agent that breaks: its exit code and its termination message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from elasticjob._runtime.agent.reporting.termination_message import read_round
from elasticjob._runtime.contract.names import Env, RoundId
from support.agent.lone_agent import OWN_COORDINATOR, lone_agent_environment
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

BREAK_WHILE_STARTING_WORKERS = f"""{OWN_COORDINATOR}
import sys
from elasticjob._runtime.agent.main import main
from elasticjob._runtime.agent.start_workers.launcher import Launcher

async def broken(self, workers, not_to_kill):
    raise RuntimeError("lost track of the workers")

async def coordinate(send):
    send(messages.StartRound(RoundId(1, 0, 1), 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 3))

Launcher.start = broken
sys.exit(main(["python3", "-c", "pass"]))
"""


def test_an_agent_that_lost_track_of_its_workers_ends_with_70_and_says_why(tmp_path: Path) -> None:
    """torch's WorkerState.UNKNOWN: the agent does not recover, it ends and leaves the node to the job manager."""
    log = tmp_path / "termination"
    argv = [sys.executable, "-c", BREAK_WHILE_STARTING_WORKERS]
    done = subprocess.run(
        argv, env=lone_agent_environment(log), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 70, done.stderr
    termination = json.loads(log.read_text())
    assert termination["outcome"] == "Error"
    assert "lost track of the workers" in termination["message"]
    assert termination["round"] == "1.0.1"


KILLED_ONCE = """
import os, pathlib, signal, time

before = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("restart", before, "agent", os.getppid(), flush=True)
if before == "0":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
"""


def test_an_agent_that_is_killed_leaves_the_round_of_its_workers_in_the_termination_message(tmp_path: Path) -> None:
    """With cgroup v2 the kernel kills the agent with its workers when the container runs out of memory."""
    with LocalRun(manifest([*script(tmp_path, KILLED_ONCE)], replicas=1), tmp_path) as run:
        agent = int(run.wait_for(r"restart 1 agent (\d+)")[1])
        variables = Path(f"/proc/{agent}/environ").read_bytes().decode().split("\0")
        (log,) = (v.partition("=")[2] for v in variables if v.startswith(f"{Env.TERMINATION_LOG}="))
        assert read_round(log) == RoundId(1, 0, 2)
