"""When processes that survive SIGKILL count as stuck in the kernel (pure); and what /proc says about them (Linux).

A killed process ends once the kernel has freed what it holds. With hundreds of gigabytes, pinned host memory and GPUs
this takes minutes on a healthy Node. A thread counts as stuck if it stays in an uninterruptible sleep and uses no
processor time. All other threads are at work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elasticjob._runtime.agent.processes import open_files

KILL_TIMEOUT = 10.0
"""Seconds after SIGKILL in which a process that holds little ends, also on a busy Node."""
RESIDENT_BYTES_PER_SECOND = 1 << 30
"""A kernel freed 7 to 13 GiB of 4 KiB pages in a second on one thread of a busy Node; this leaves room."""
PINNED_BYTES_PER_SECOND = 256 << 20
"""Locked and registered pages are unpinned one by one, under locks that all ranks of a Node share. An estimate with
room, not measured."""
SECONDS_PER_GPU = 15.0
"""A driver tears down contexts, peer mappings and host memory that it has pinned itself (/proc does not count it), GPU
by GPU: an estimate with room, not measured."""
LONGEST_KILL = 600.0
"""The agent waits at most this many seconds, whatever the processes hold: the pod must not stay for ever."""
POLL_INTERVAL = 1.0
"""Seconds between two polls of processes that are overdue."""
BLOCKED_POLLS = 5
"""A thread is stuck if so many polls in a row find it asleep, and it has not used the processor between them."""

BlockedThread: TypeAlias = tuple[int, int]
"""A thread in an uninterruptible sleep: (id, processor time in clock ticks)."""

_GPU = re.compile(r"/dev/(nvidia\d+|dri/renderD\d+)$")
_USER_TIME, _SYSTEM_TIME = 11, 12
"""Indices, from the state on, of the fields of /proc/PID/stat."""


@dataclass(frozen=True)
class HeldResources:
    """What processes hold, all together."""

    resident: int = 0
    """Bytes."""
    pinned: int = 0
    """Bytes that are locked or registered with a device."""
    gpus: int = 0


def kill_timeout(held: HeldResources) -> float:
    """Return the seconds after SIGKILL in which processes with these resources are not overdue."""
    seconds = KILL_TIMEOUT
    seconds += held.resident / RESIDENT_BYTES_PER_SECOND + held.pinned / PINNED_BYTES_PER_SECOND
    return min(seconds + held.gpus * SECONDS_PER_GPU, LONGEST_KILL)


@dataclass(frozen=True)
class BlockedThreads:
    """The threads that were blocked in each of the last `polls` polls."""

    threads: frozenset[BlockedThread] = frozenset()
    polls: int = 0

    def poll(self, blocked: frozenset[BlockedThread]) -> BlockedThreads:
        """Return the state after one more poll, which found the threads `blocked`."""
        still = self.threads & blocked
        return BlockedThreads(still, self.polls + 1) if still else BlockedThreads(blocked, int(bool(blocked)))

    @property
    def stuck(self) -> bool:
        """Whether a thread has slept through enough polls to count as stuck."""
        return self.polls >= BLOCKED_POLLS


def held_resources(pids: Iterable[int], proc: Path = Path("/proc")) -> HeldResources:
    """Return what the processes hold together. A process that has ended, or cannot be read, counts as nothing."""
    resident = pinned = 0
    gpus: set[str] = set()
    for pid in pids:
        sizes = _memory(proc / str(pid) / "status")
        resident += sizes.get("VmRSS", 0)
        pinned += sizes.get("VmLck", 0) + sizes.get("VmPin", 0)
        gpus |= {path for path in open_files(proc / str(pid)).values() if _GPU.match(path)}
    return HeldResources(resident, pinned, len(gpus))


def blocked_threads(pids: Iterable[int], proc: Path = Path("/proc")) -> frozenset[BlockedThread]:
    """Return the threads of the processes that are in an uninterruptible sleep."""
    found: set[BlockedThread] = set()
    for pid in pids:
        with suppress(OSError):
            for task in (proc / str(pid) / "task").iterdir():
                with suppress(OSError):  # the thread has ended
                    fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
                    if fields[0] == "D":
                        found.add((int(task.name), int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])))
    return frozenset(found)


def _memory(status: Path) -> dict[str, int]:
    """Return the sizes in /proc/PID/status, in bytes by name."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in status.read_text(errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                found[name] = int(rest.split()[0]) * 1024
    return found
