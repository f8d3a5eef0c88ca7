"""The versions that the tests of this folder let talk to today's: the archives beside this file (`keep`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
TODAY = FOLDER.parents[1]
VERSIONS = sorted(path.name.removeprefix("elasticjob-").removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))
_PEER = FOLDER / "peer.py"
_FOLDERS: list[TemporaryDirectory[str]] = []
"""Deleted when this process ends."""


@cache
def code_of(version: str) -> Path:
    """Return a folder with the code of a version: `agent`, `operator` and `crds`, as in the repository."""
    _FOLDERS.append(TemporaryDirectory(prefix=f"elasticjob-{version}-"))
    folder = Path(_FOLDERS[-1].name)
    with tarfile.open(FOLDER / f"elasticjob-{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def peer_command(*arguments: str) -> list[str]:
    return [sys.executable, str(_PEER), *arguments]


def environment_of(code: Path) -> dict[str, str]:
    """Return the environment of a process that imports this code."""
    return {**os.environ, "PYTHONPATH": f"{code / 'agent'}{os.pathsep}{code / 'operator'}"}


def ask(code: Path, *arguments: str, stdin: str = "") -> str:
    """Run a command of `peer` under this code and return what it prints."""
    done = subprocess.run(
        peer_command(*arguments), env=environment_of(code), input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(arguments)} with the code in {code}:\n{done.stderr}"
    return done.stdout
