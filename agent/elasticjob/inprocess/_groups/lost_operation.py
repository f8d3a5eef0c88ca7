"""Recognize an operation that gloo has lost: nothing in this process can end the wait for it.

gloo fails the operations that wait for a connection before it closes it, but not the one whose bytes it was just
sending or receiving (`Pair::signalException` of its TCP transport): that one waits for the group's time-out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticjob.inprocess._groups.own_sockets import ip_sockets, listens, own_open_files

_GLOO_WORKER = "pt_gloo_runloop"
"""Name of the threads in which torch runs collectives of gloo."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Number of the system call in which a thread waits for another one, by processor type."""
_ASLEEP_SECONDS = 0.05
"""How long threads must not have run. One that waits for the interpreter's lock runs each 5 ms."""


def gloo_workers() -> frozenset[str]:
    """Return the ids of the threads in which torch runs collectives of gloo."""
    return frozenset(_threads(_GLOO_WORKER))


def waits_for_lost_operation(older_workers: frozenset[str]) -> bool:
    """Return whether the main thread can only be freed by gloo's time-out.

    That is so if it sleeps, a thread of gloo sleeps until a deadline, and no socket is left that could wake them. Two
    samples, `_ASLEEP_SECONDS` apart, confirm it: send no signals in the meantime.

    Call it after the connections were shut down, and after a signal that ends all other waits of the main thread.

    Args:
        older_workers: Threads of gloo that do not count.
    """
    before = _sleepers(older_workers)
    if not before or _epoll_watches_connection():
        return False
    time.sleep(_ASLEEP_SECONDS)
    return not before.isdisjoint(_sleepers(older_workers))


def _sleepers(older_workers: frozenset[str]) -> set[tuple[_Sleeper, _Sleeper]]:
    """Return each thread of gloo that waits until a deadline, with the main thread; none if that runs."""
    main = _sleeper(str(os.getpid()))
    workers = map(_sleeper, gloo_workers() - older_workers)
    return {(main, worker) for worker in workers if main and worker and worker.has_deadline}


def _epoll_watches_connection() -> bool:
    """Return whether any thread of this process may wait for events of an IP connection, as gloo's do."""
    connections = {number for number, found in ip_sockets() if not listens(found)}
    watched = set()
    for number, link in own_open_files().items():
        with suppress(OSError):  # closed since
            if link == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{number}").read_text()
                watched |= {int(found) for found in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)}
    return not watched.isdisjoint(connections)


def _threads(name: str) -> Iterator[str]:
    """Yield the ids of this process's threads of a name."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208  (a directory of numbers, not of files)
        with suppress(OSError):  # ended since
            if Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").strip() == name:
                yield task


@dataclass(frozen=True)
class _Sleeper:
    """A thread that waits for another one. Two samples of it are equal if it has not run in between."""

    task: str
    call: tuple[str, ...]
    """The arguments of its system call; the fourth one is the address of the deadline."""
    switches: str
    """How often it has begun to wait for something."""

    @property
    def has_deadline(self) -> bool:
        return int(self.call[3], 16) != 0


def _sleeper(task: str) -> _Sleeper | None:
    """Return a thread that waits for another one; None if it does not, or if the kernel does not show it."""
    folder = Path("/proc/self/task", task)
    try:
        number, *arguments = (folder / "syscall").read_text().split()
        switches = re.search(
            r"^voluntary_ctxt_switches:\s*(\d+)", (folder / "status").read_text(errors="replace"), re.MULTILINE
        )
    except (OSError, ValueError):  # ended since
        return None
    if number != _FUTEX.get(os.uname().machine) or switches is None:
        return None
    return _Sleeper(task, tuple(arguments), switches[1])
