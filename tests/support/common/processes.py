"""Find and signal the processes of a pod of the test cluster or of a local run."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from support.cluster.kube import Json


def of_pod(pod: Json) -> list[int]:
    """Return the process ids of a pod's containers, found by cgroup."""
    uid = pod["metadata"]["uid"]
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                cgroup = (entry / "cgroup").read_text()
            except OSError:
                continue  # the process has ended
            if uid in cgroup or uid.replace("-", "_") in cgroup:
                pids.append(int(entry.name))
    return pids


def send(pod: Json, number: signal.Signals) -> None:
    """Send a signal to every process of a pod."""
    for pid in of_pod(pod):
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


def child_with(argument: str) -> int:
    """Return the process id of the grandchild of this test whose last argument is `argument`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().rstrip(b"\0").split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if arguments[-1] == argument.encode() and grandparent == os.getpid():
            return int(path.parent.name)
    raise AssertionError(f"no process with the argument {argument}")


def agent_over(pid: int) -> int:
    """Return the process id of the agent among the parents of a worker."""
    while b"\0agent\0--\0" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def ended_for_gloo(output: str) -> set[int]:
    """Return the processes that have ended themselves because gloo had lost an operation, as this output says.

    Any rank that a crash of another one interrupts may be among them: one of 100, more on a busy machine.
    """
    return {int(pid) for pid in re.findall(r"gloo has lost an operation .* replaces (\d+)", output)}


def stayed(before: int, now: int, output: str) -> bool:
    """Return whether a rank has the same process as before, or another one only because gloo had lost its operation."""
    return now == before or before in ended_for_gloo(output)


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment at the start of a process."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def state_of(pid: int) -> str:
    """Return the state of a process in Linux' letters: R, S, T (stopped) ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
