"""The cluster's processes: started so that they outlive the command, found again by a mark, ended for certain.

No process id is ever recorded. Each process carries `ELASTICJOB_CLUSTER=<part>@<state folder>` in its environment,
which containerd's shims inherit; a clean-up reads the marks from /proc. So nobody else's process can be taken for ours
after a crash or a reboot, and a start that was killed half-way leaves nothing that the next command cannot find.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError

MARK = "ELASTICJOB_CLUSTER"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Process:
    """One live process of a cluster."""

    pid: int
    part: str
    """Which part started it, for instance `control/etcd` or `node1/containerd` (its shims too)."""
    state: Path
    """State folder of the cluster that it belongs to."""
    command: str
    """The kernel's name of the program."""


def start(part: str, argv: Sequence[str], *, state: Path, log: Path, namespace: str) -> None:
    """Starts a program in a network namespace, in its own session, its output appended to `log`."""
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
            env={"PATH": PATH, "HOME": "/root", MARK: f"{part}@{state}"},
        )


def find(state: Path | None = None) -> list[Process]:
    """Live processes of the cluster in `state`, or of every cluster on this machine."""
    found = (read(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None and state in (None, process.state)]


def read(pid: int) -> Process | None:
    """What /proc says of a process, None when it is gone, a zombie, or no part of a cluster."""
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
    """Signals exactly this process: a handle is taken first, then the mark is read again, so a reused id is safe."""
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


def terminate(look: Callable[[], Iterable[Process]], grace: float = 10.0) -> None:
    """SIGTERM to all that `look` finds, SIGKILL to what is left after `grace` seconds; returns when all are gone."""
    for process in look():
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while list(look()):
        if time.monotonic() >= deadline:
            return kill(look)
        time.sleep(0.02)
    return None


def kill(look: Callable[[], Iterable[Process]], timeout: float = 20.0) -> None:
    """SIGKILL to all that `look` finds, again until it finds none (a dying parent may have started one more)."""
    deadline = time.monotonic() + timeout
    while remaining := list(look()):
        if time.monotonic() >= deadline:
            names = ", ".join(f"{process.command} ({process.pid})" for process in remaining)
            raise ClusterError(f"these processes do not die: {names}")
        for process in remaining:
            send(process, signal.SIGKILL)
        time.sleep(0.01)
