"""Tests that need an NVIDIA GPU and a torch that can use it. Elsewhere they are skipped."""

from __future__ import annotations

import functools
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


@pytest.fixture(autouse=True)
def gpu() -> None:
    if reason := missing():
        pytest.skip(reason)
