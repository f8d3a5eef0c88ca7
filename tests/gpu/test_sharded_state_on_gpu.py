"""`elasticjob.ShardedState` with FSDP2 and nccl on a real GPU. Ranks share it: each claims to be a host of its own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded" / "train.py"

SHARES_THE_GPU = """
import os, runpy, sys
os.environ["NCCL_HOSTID"] = str(os.getpid())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(300)
def test_a_lost_node_costs_at_most_one_committed_step(tmp_path: Path) -> None:
    command = [*script(tmp_path, SHARES_THE_GPU), str(EXAMPLE), "--step-delay=0.02"]
    policy = {"minReplicas": 2, "maxReplicas": 3}
    job = manifest([*command, "--steps=100000"], replicas=3, elasticPolicy=policy, preload=["torch", "torch._dynamo"])
    with LocalRun(job, tmp_path) as run:
        pid = int(run.wait_for(r"rank=1 world=3 begins after step=0 restored=False pid=(\d+)", 120)[1])
        run.wait_for("step=12 .* world=3 rank=2")
        os.kill(parent(pid), signal.SIGKILL)
        begin = int(run.wait_for(r"world=2 begins after step=(\d+) restored=True", 120)[1])
        before = max(int(step) for step in re.findall(r"step=(\d+) loss=\S+ world=3", run.text))
        assert before - 1 <= begin <= before + 1, run.text
        end = int(run.wait_for(r"world=3 begins after step=(\d+) restored=True", 120)[1])
        run.wait_for(f"step={end + 5} ")
        run.signal(signal.SIGINT)
        assert run.exit_code() == 130
    with LocalRun(manifest([*command, f"--steps={end + 5}"], replicas=3, preload=["torch"]), tmp_path) as alone:
        assert alone.exit_code() == 0, alone.text
    expected, found = losses(alone.text), losses(run.text)
    for step in range(1, end + 6):
        assert found.get(step, expected[step]) == pytest.approx(expected[step], abs=2e-3), f"step {step}"


def losses(text: str) -> dict[int, float]:
    """Return the last loss of each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step=(\d+) loss=(\S+) ", text)}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
