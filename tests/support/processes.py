"""Processes as this machine sees them: of a container of the test cluster, of a local run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.kube import Json


def of_pod(pod: Json) -> list[int]:
    """Process ids of a pod's containers, by its cgroup."""
    uid = pod["metadata"]["uid"]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                cgroup = (entry / "cgroup").read_text()
            except OSError:
                continue  # it ended meanwhile
            if uid in cgroup or uid.replace("-", "_") in cgroup:
                found.append(int(entry.name))
    return found


def send(pod: Json, number: signal.Signals) -> None:
    """A signal to every process of a pod."""
    for pid in of_pod(pod):
        os.kill(pid, number)


def child_with(word: str) -> int:
    """The grandchild of this test whose command line ends with `word`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().rstrip(b"\0").split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if words[-1] == word.encode() and grandparent == os.getpid():
            return int(path.parent.name)
    raise AssertionError(f"no process {word}")


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def state_of(pid: int) -> str:
    """One letter: R, S, T (stopped) ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
