"""The source of a release: the files that git tracks, the commit, and its time."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tomllib

REPOSITORY = Path(__file__).resolve().parents[2]


class ReleaseError(Exception):
    """Nothing can be released; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A copy of the tracked files in `folder`. `epoch`: the commit's time in Unix seconds."""

    folder: Path
    version: str
    commit: str
    epoch: int
    changed: bool
    """Whether the files differ from those of the commit."""


def copy_source(folder: Path, allow_changes: bool, repository: Path = REPOSITORY) -> Source:
    """Copy the tracked files of the checkout, as they are now, to a folder. ReleaseError if they have changes that are
    in no commit, unless these are allowed."""
    changed = bool(_git(repository, "status", "--porcelain", "--untracked-files=no"))
    if changed and not allow_changes:
        raise ReleaseError("the checkout has changes that are in no commit: commit them, or pass --allow-changes")
    commit, epoch = _git(repository, "log", "-1", "--format=%H %ct").split()
    for name in _git(repository, "ls-files", "-z").split("\0"):
        path = repository / name
        if name and path.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    return Source(folder, read_version(folder), commit, int(epoch), changed)


def read_version(folder: Path = REPOSITORY) -> str:
    """Return the version, which pyproject.toml has."""
    found: str = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    return found


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"a release needs git and a commit: {done.stderr.strip()}")
    return done.stdout.strip()
