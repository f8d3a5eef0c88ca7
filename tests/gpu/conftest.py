"""Tests that need an NVIDIA GPU and a torch that can use it. Elsewhere they are skipped.

In a rehearsal (`make gpu CPU=1`) those that are marked `rehearsed` run over gloo.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest


@functools.cache
def missing() -> str:
    """Return why no test here can run; empty if they can. It asks another process: this one must not start CUDA."""
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine"
    check = "import torch; assert torch.cuda.is_available(), 'torch cannot use the GPU'"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    return result.stderr.strip().rsplit("\n", 1)[-1] if result.returncode else ""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rehearsed: can use the CPU instead of a GPU")
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which `make gpu` does not need")


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    rehearsed = request.node.get_closest_marker("rehearsed") is not None
    if os.environ.get("ELASTICJOB_GPU_REHEARSAL") and rehearsed:
        return
    if reason := missing():
        pytest.skip(reason)
