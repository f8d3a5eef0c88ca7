"""Forked workers on a real GPU: which imports allow them, what the driver's state says, how a killed one comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.system.code_root import CODE_ROOT
from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

RESOURCES = {"limits": {"nvidia.com/gpu": 1}}

COMPUTES = """
import os, sys, time
import torch
start = time.time()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
product = torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
assert product.mean().item() == 512.0
print(f"computed pid {os.getpid()} restart {os.environ['TORCHELASTIC_RESTART_COUNT']} after {time.time() - start:.2f} s"
      f" at {time.time():.3f}", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def gpu_job(command: list[str], **spec: Any) -> dict[str, object]:
    """Return a job whose trainer asks for one GPU."""
    job = manifest(command, **spec)
    containers = job["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
    containers[0]["resources"] = RESOURCES
    return job


def preload_module(folder: Path, text: str) -> dict[str, Any]:
    """Write a module that is preloaded; return the fields of a job's spec that preload it after torch."""
    (folder / "preloaded.py").write_text(text)
    return {"preload": ["torch", "preloaded"]}


def test_a_killed_worker_is_forked_again_and_uses_the_gpu(tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = gpu_job([*script(tmp_path, COMPUTES), str(done)], nprocPerNode="gpu", preload=["torch"])
    with LocalRun(job, tmp_path) as run:
        run.wait_for("fork server ready")
        first = int(run.wait_for(r"computed pid (\d+) restart 0")[1])
        os.kill(first, signal.SIGKILL)
        assert int(run.wait_for(r"computed pid (\d+) restart 1")[1]) != first
        done.touch()
        assert run.exit_code() == 0, run.text


@pytest.mark.parametrize(
    "text",
    ["import torch; torch.cuda.init()", "import torch; torch.zeros(1).cuda()"],
    ids=["initializes the driver", "allocates"],
)
def test_an_import_that_uses_the_gpu_turns_forks_off(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = tmp_path / "done"
    job = gpu_job([*script(tmp_path, COMPUTES), str(done)], **preload_module(tmp_path, text))
    with LocalRun(job, tmp_path) as run:
        run.wait_for(r"workers start by exec: importing the preloaded modules (opened /dev/nvidia|initialized|started)")
        run.wait_for("computed pid")
        done.touch()
        assert run.exit_code() == 0, run.text


def test_an_import_that_asks_torch_for_gpus_keeps_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = tmp_path / "done"
    text = "import torch; assert torch.cuda.is_available() and torch.cuda.device_count() > 0"
    job = gpu_job([*script(tmp_path, COMPUTES), str(done)], **preload_module(tmp_path, text))
    with LocalRun(job, tmp_path) as run:
        run.wait_for("fork server ready")
        run.wait_for("computed pid")
        done.touch()
        assert run.exit_code() == 0, run.text


def test_an_import_that_keeps_nvml_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older drivers leave one open file, and forks go on. Newer ones leave a thread: the reason names it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = tmp_path / "done"
    text = "import ctypes; library = ctypes.CDLL('libnvidia-ml.so.1'); assert library.nvmlInit_v2() == 0"
    job = gpu_job([*script(tmp_path, COMPUTES), str(done)], **preload_module(tmp_path, text))
    with LocalRun(job, tmp_path) as run:
        run.wait_for(r"fork server ready|workers start by exec: importing the preloaded modules started 1 thread: cuda")
        run.wait_for("computed pid")
        done.touch()
        assert run.exit_code() == 0, run.text


def test_a_healthy_gpu_passes_the_compute_check() -> None:
    program = [
        "import ctypes, sys; sys.path.insert(0, sys.argv[1])",
        "from elasticjob._runtime.agent.monitoring.node.gpu_compute import CudaDriver, check_result",
        "driver = CudaDriver(ctypes.CDLL('libcuda.so.1')); assert driver.count() > 0",
        "result = driver.compute(0); assert check_result(result) == '', check_result(result)",
        "changed = bytes([result[0] ^ 1]) + result[1:]; assert check_result(changed)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(program), CODE_ROOT], check=True)
