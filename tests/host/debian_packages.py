"""Installation of Debian packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .console import Console
from .errors import SetupError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOCK = Path("/run/elasticjob-apt.lock")
"""apt-get fails while another apt-get runs; cluster and images may install packages at the same time."""


def has_apt() -> bool:
    return shutil.which("apt-get", path=PATH) is not None


def install(packages: Sequence[str], console: Console) -> None:
    """Install Debian packages with apt-get; raise SetupError with their names where that is not possible."""
    wanted = " ".join(packages)
    if not has_apt():
        raise SetupError(
            f"missing: {wanted} (names of Debian packages); install them with this system's package manager"
        )
    if os.geteuid() != 0:
        raise SetupError(f"missing: {wanted}; install them with apt-get, or run this as root")
    console.progress(f"installing Debian packages: {wanted}")
    options = ["-qq", "-o", "DPkg::Lock::Timeout=600"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            run(["apt-get", *options, *command], environment)


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run a command; raise SetupError with the last line of its output if it fails."""
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise SetupError(f"`{' '.join(command)}` failed: {lines[-1] if lines else result.returncode}")
