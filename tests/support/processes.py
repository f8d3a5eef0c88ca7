"""Processes of a container, as the machine sees them: the nodes of a test cluster are this machine."""

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
