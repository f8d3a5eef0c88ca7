"""A worker's environment is the same as under the torchrun of the installed torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.local.run import LocalRun, manifest

SCRIPT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""
VARYING = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""Variables with another value in each run."""
TORCHRUN_ONLY = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""torchrun's own option, which newer versions leave in their environment."""

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Not torchrun's value: docs/reference/environment-variables.md says why."""


@pytest.mark.torch
def test_environment_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    subprocess.run([*torchrun, *options, str(script), str(tmp_path / "theirs")], check=True, capture_output=True)
    command = [*torchrun, *options, str(script), str(tmp_path / "ours")]
    with LocalRun(manifest(command, nprocPerNode=2, failurePolicy={"maxRestarts": 3}), tmp_path) as run:
        assert run.exit_code(100) == 0
    for rank in ("0", "1"):
        theirs, ours = (json.loads((tmp_path / name / rank).read_text()) for name in ("theirs", "ours"))
        added = {name for name in ours.keys() - theirs.keys() if not name.startswith("ELASTICJOB_")}
        kubeflow = {"KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"}
        assert added <= {"PET_NPROC_PER_NODE", "PYTHONPATH", "RES_OPTIONS", "USE_LIBUV"} | kubeflow
        assert theirs.keys() - ours.keys() <= TORCHRUN_ONLY
        assert (theirs.pop(NCCL_ERRORS), ours.pop(NCCL_ERRORS)) == ("1", "3")
        other = {name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]} - VARYING
        assert not other, {name: (theirs[name], ours[name]) for name in other}
