"""Unhealthy nodes, with real processes: nvidia-smi is a script here, all else is as in a pod."""

from __future__ import annotations

import os
from pathlib import Path

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

UNTIL_FILE = """
import os, sys, time
print("started", os.environ["RANK"], os.environ["ELASTICJOB_POD_NAME"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if os.path.exists(sys.argv[1] + ".fail"):
    raise SystemExit(3)
"""


def job(folder: Path, smi: str) -> dict[str, object]:
    """A job of two nodes with one GPU each; `smi` is the shell script that acts as nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{smi}\n")
    program.chmod(0o755)
    made = manifest([*script(folder, UNTIL_FILE), str(folder / "done")], replicas=2)
    container = made["spec"]["template"]["spec"]["containers"][0]  # type: ignore[index]
    container["env"] = [{"name": "PATH", "value": f"{folder}:{os.environ['PATH']}"}]
    container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    return made


def test_a_node_whose_gpu_is_lost_never_trains_and_is_replaced(tmp_path: Path) -> None:
    smi = '[ "$ELASTICJOB_POD_NAME" = toy-1-0 ] && echo "No devices were found" || echo "0, 0, No, No"'
    with LocalRun(job(tmp_path, smi), tmp_path) as run:
        run.wait_for("toy-1-0: a health check failed, this pod leaves: No devices were found")
        run.wait_for("toy-1-0 ended .exit 143, left.; toy-1-1 takes its place")
        started = {run.wait_for(r"started \d (\S+)")[1] for _ in range(2)}
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert started == {"toy-0-0", "toy-1-1"}
    assert "toy succeeded; 0 restarts" in run.text


def test_a_gpu_that_broke_under_a_worker_is_found_after_its_failure(tmp_path: Path) -> None:
    smi = f'[ -e {tmp_path}/broken.$ELASTICJOB_POD_NAME ] && echo "0, 1, No, No" || echo "0, 0, No, No"'
    body = UNTIL_FILE.replace("sys.argv[1]", 'sys.argv[1] + "." + os.environ["ELASTICJOB_POD_NAME"]')
    made = job(tmp_path, smi)
    (tmp_path / "script.py").write_text(body)
    with LocalRun(made, tmp_path) as run:
        for _ in range(2):
            run.wait_for("started")
        (tmp_path / "broken.toy-1-0").touch()
        (tmp_path / "done.toy-1-0.fail").touch()
        (tmp_path / "done.toy-1-0").touch()
        run.wait_for("toy-1-0: a health check failed, this pod leaves: GPU 0: uncorrectable memory error")
        run.wait_for("toy-1-1 takes its place")
        run.wait_for(r"started \d toy-1-1")
        (tmp_path / "done.toy-0-0").touch()
        (tmp_path / "done.toy-1-1").touch()
        assert run.exit_code() == 0
