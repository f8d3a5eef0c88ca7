"""The Python packages: a wheel, and the source that it is built from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from release.source import ReleaseError, Source


def build_packages(source: Source, dist: Path) -> list[Path]:
    """Build sdist and wheel with the hatchling of this Python, which reads no network."""
    before = set(dist.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(dist)],
        cwd=source.folder, env={**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ReleaseError(f"hatchling cannot build the packages:\n{done.stdout}{done.stderr}")
    return sorted(set(dist.iterdir()) - before)
