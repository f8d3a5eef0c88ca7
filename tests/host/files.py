"""Walks over folders that change meanwhile, such as control groups and /proc: what vanishes is left out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path


def children(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the sorted entries of a folder whose names match; empty if there is no such folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  # Path.glob fails on a folder that vanishes
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def folders(root: Path) -> Iterator[Path]:
    """Yield the folders below `root`, and `root` itself last, so that each is empty of folders when it comes."""
    for folder, _, _ in os.walk(root, topdown=False):
        yield Path(folder)


def read(path: Path) -> str:
    """Return the text of a file; empty if it no longer exists."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError as error:
        if error.errno != errno.ENODEV:  # a control group that was removed after its file was opened
            raise
        return ""
