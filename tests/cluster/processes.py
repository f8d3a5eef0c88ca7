"""Start, find and end the cluster's processes, which outlive the command that starts them.

No process id is recorded. Each process has the mark `ELASTICJOB_CLUSTER=<part>@<state folder>` in its environment,
which containerd's shims inherit, and a clean-up reads the marks from /proc. So a clean-up ends no other processes, even
after a crash or a reboot, and it finds all processes of an incomplete start.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from host import files
from host.debian_packages import PATH

from .errors import ClusterError

MARK = "ELASTICJOB_CLUSTER"


@dataclass(frozen=True)
class Process:
    """One live process of a cluster."""

    pid: int
    part: str
    """The component that it belongs to, for instance `control/etcd` or `node1/containerd` (also for its shims)."""
    state: Path
    """State folder of the cluster that it belongs to."""
    command: str
    """The name of the program as the kernel has it, cut after 15 characters."""


def start(part: str, argv: Sequence[str], *, state: Path, log: Path, namespace: str) -> None:
    """Start a program in a network namespace and in its own session; append its output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not `ip netns exec`: it mounts a fresh /sys, which hides the cgroups. setsid --fork leaves no child to reap.
    enter = ["setsid", "--fork", "nsenter", f"--net=/run/netns/{namespace}", "--"]
    with log.open("ab") as output:
        subprocess.run(
            [*enter, *argv],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            # Collecting garbage a quarter as often saves processor time, which the tests need, and there is memory.
            env={"PATH": PATH, "HOME": "/root", "GOGC": "400", MARK: f"{part}@{state}"},
        )


def find(state: Path | None = None) -> list[Process]:
    """Return the live processes of the cluster in `state`; None: of every cluster on this machine."""
    found = (read(int(entry.name)) for entry in files.children(Path("/proc"), "[0-9]*"))
    return [process for process in found if process is not None and state in (None, process.state)]


def read(pid: int) -> Process | None:
    """Read a process from /proc; None when it has ended, is a zombie, or belongs to no cluster."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK.encode():
            part, _, state = value.decode(errors="replace").partition("@")
            return Process(pid, part, Path(state), command)
    return None


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to exactly this process.

    A pidfd is opened first and the mark is read again after that, so a reused process id gets no signal.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if read(process.pid) == process:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def terminate(find_all: Callable[[], Iterable[Process]], grace: float = 10.0) -> None:
    """Send SIGTERM to all processes that `find_all` returns, SIGKILL after `grace` seconds; wait until all ended."""
    for process in find_all():
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while list(find_all()):
        if time.monotonic() >= deadline:
            return kill(find_all)
        time.sleep(0.02)
    return None


def kill(find_all: Callable[[], Iterable[Process]], timeout: float = 20.0) -> None:
    """Send SIGKILL until `find_all` returns no process: a process may start another one before it dies."""
    deadline = time.monotonic() + timeout
    while remaining := list(find_all()):
        if time.monotonic() >= deadline:
            names = ", ".join(f"{process.command} ({process.pid})" for process in remaining)
            raise ClusterError(f"these processes do not end after SIGKILL: {names}")
        for process in remaining:
            send(process, signal.SIGKILL)
        time.sleep(0.01)
