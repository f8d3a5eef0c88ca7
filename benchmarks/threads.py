"""Figures of a process's threads, from /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def thread_files(pid: int, name: str) -> list[str]:
    """Return the text of /proc/PID/task/*/NAME of each thread, but of those that end meanwhile."""
    texts: list[str] = []
    for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # Path.glob fails on a folder that vanishes
        with suppress(FileNotFoundError, ProcessLookupError):
            texts.append(Path(f"/proc/{pid}/task/{task}/{name}").read_text())
    return texts
