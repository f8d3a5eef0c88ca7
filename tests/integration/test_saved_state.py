"""Agents save the training state of their workers when a job ends, after the termination message."""

from __future__ import annotations

import fcntl
import tempfile
import time
from pathlib import Path

from elasticjob._runtime.contract.snapshot_format.state_file import read_file_header
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

COMMITS_AND_EXITS = """
import json, sys
from elasticjob.training import progress_channel
from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, BlockHeader

path, code = sys.argv[1:]
memory = progress_channel.node_memory()[0]
text = json.dumps({"path": path, "tree": {}}).encode()
view = state_block.begin_write(memory, HEADER_SIZE + len(text))
view[HEADER_SIZE:] = text
state_block.finish_write(memory, BlockHeader(1, 5, len(text), len(view)))
sys.exit(int(code))
"""


def job(folder: Path, code: int, **spec: object) -> dict[str, object]:
    command = [*script(folder, COMMITS_AND_EXITS), str(folder / "state"), str(code)]
    return manifest(command, preload=["json"], failurePolicy={"maxRestarts": 0}, **spec)  # type: ignore[arg-type]


def test_a_job_that_fails_saves_its_state_once(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path, 3, replicas=2), tmp_path) as run:
        assert run.exit_code() == 1
    assert run.text.count("training state saved") == 1, run.text
    assert read_file_header(str(tmp_path / "state")).version == (1, 5)


def test_a_script_that_succeeds_has_saved_what_it_wants(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path, 0), tmp_path) as run:
        assert run.exit_code() == 0
    assert not (tmp_path / "state").exists()


def test_slow_storage_does_not_delay_the_termination_message(tmp_path: Path) -> None:
    with (tmp_path / "state.tmp").open("wb") as storage:
        fcntl.flock(storage, fcntl.LOCK_EX)  # another node is writing
        with LocalRun(job(tmp_path, 3, name="slow-storage"), tmp_path) as run:
            wait_for_termination("slow-storage")
            assert run.process.poll() is None
            assert not (tmp_path / "state").exists()
            fcntl.flock(storage, fcntl.LOCK_UN)
            run.wait_for("training state saved")
            assert run.exit_code() == 1


def wait_for_termination(name: str) -> None:
    """Wait until the job's only agent has written its termination message."""
    deadline, text = time.monotonic() + 60, ""
    while '"Failed"' not in text:
        assert time.monotonic() < deadline, f"the termination message is {text!r}"
        time.sleep(0.01)
        for path in Path(tempfile.gettempdir()).glob(f"elasticjob-{name}-*/{name}-0-0.json"):
            text = path.read_text()
