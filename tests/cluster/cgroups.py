"""Control groups of the nodes' containers, in version 1 (one tree per controller) or 2 (one tree)."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from host import files

from .errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
NEEDED = ("cpu", "cpuset", "memory", "pids")


def unified() -> bool:
    """Return whether the machine uses cgroup version 2."""
    return (ROOT / "cgroup.controllers").exists()


def problem() -> str | None:
    """Return why containers cannot be limited on this machine; None when they can."""
    if unified():
        present = (ROOT / "cgroup.controllers").read_text().split()
    else:
        present = [name for name in NEEDED if (ROOT / name / "cgroup.procs").exists()]
    if missing := [name for name in NEEDED if name not in present]:
        return f"no cgroup controller {', '.join(missing)} under {ROOT}: mount cgroups (version 1 or 2) there"
    trees = [ROOT] if unified() else [ROOT / name for name in NEEDED]
    if readonly := [str(tree) for tree in trees if not os.access(tree, os.W_OK)]:
        return f"{readonly[0]} cannot be written: run on the machine itself or in a privileged container"
    return None


def create(name: str) -> None:
    """Create the group `name` in every tree unless it exists."""
    if unified():
        (ROOT / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in NEEDED))
        return (ROOT / name).mkdir(exist_ok=True)
    for tree in (folder for folder in files.children(ROOT) if (folder / "tasks").exists()):
        (tree / name).mkdir(exist_ok=True)
    for setting in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset is empty, and accepts no process until it is set
        (ROOT / "cpuset" / name / setting).write_text((ROOT / "cpuset" / setting).read_text())
    return None


def roots(name: str) -> list[Path]:
    """Return the folders of group `name` directly below the root of each tree; `name` may be a glob pattern."""
    return [group for tree in (ROOT, *files.children(ROOT)) for group in files.children(tree, name)]


def pids(name: str) -> set[int]:
    """Return the ids of all processes in the group `name` or below it."""
    groups = (group for root in roots(name) for group in files.folders(root))
    return {int(pid) for group in groups for pid in files.read(group / "cgroup.procs").split()}


def kill_once(name: str) -> int:
    """Send SIGKILL to every process in the group `name` or below it; return how many there were.

    They are stopped before: none sees that another one has ended, as on a machine that fails.
    """
    present = pids(name)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in present:
            with suppress(ProcessLookupError):  # the kernel does not reuse a process id that soon
                os.kill(pid, number)
    return len(present)


def kill(name: str, timeout: float = 20.0) -> None:
    """Send SIGKILL until no process is left in the group `name` or below it."""
    deadline = time.monotonic() + timeout
    while kill_once(name):
        if time.monotonic() >= deadline:
            raise ClusterError(f"processes in cgroup {name} do not end after SIGKILL: {sorted(pids(name))}")
        time.sleep(0.01)


def remove(name: str) -> None:
    """Remove the empty group `name` and all groups below it."""
    for root in roots(name):
        for group in files.folders(root):
            with suppress(FileNotFoundError):
                group.rmdir()
