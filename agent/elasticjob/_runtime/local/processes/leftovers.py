"""End what a pod of a local run has left behind when its agent was killed, or all of them when the run was.

On a cluster the end of a container is the end of all its processes. Here the kernel ends the workers with their agent
(`die_with_parent`), but not the processes that the workers have started, such as those of a data loader.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from elasticjob._runtime.agent.processes import has_ended
from elasticjob._runtime.contract.names import Env

_TIMEOUT = 5.0
"""Seconds for the kernel to end killed processes."""
_INTERVAL = 0.02


async def end_leftovers(run_id: str, pods: Collection[str] | None = None) -> set[int]:
    """Kill all processes of these pods until none is left; return those that live on after `_TIMEOUT`.

    `pods`: None for all processes of the run.

    They are recognized by the environment with which their program was started, because they may have lost their
    parents. A program that was started with another environment is not found.
    """
    deadline = time.monotonic() + _TIMEOUT
    while (alive := set(_processes_of(run_id, pods))) and time.monotonic() < deadline:
        for pid in alive:
            _kill(pid, run_id, pods)
        await asyncio.sleep(_INTERVAL)
    return alive


def _processes_of(run_id: str, pods: Collection[str] | None) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _belongs(int(folder.name), run_id, pods) and not has_ended(int(folder.name)):
            yield int(folder.name)


def _belongs(pid: int, run_id: str, pods: Collection[str] | None) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or is another user's
        return False
    own = dict(variable.partition("=")[::2] for variable in variables)
    return own.get(Env.RUN_ID) == run_id and (pods is None or own.get(Env.POD_NAME) in pods)


def _kill(pid: int, run_id: str, pods: Collection[str] | None) -> None:
    """Kill a process, unless it has ended and its number is another one's by now."""
    with suppress(OSError):
        try:
            process = os.pidfd_open(pid)
        except (AttributeError, OSError):  # Python or the kernel lacks it
            if _belongs(pid, run_id, pods):
                os.kill(pid, signal.SIGKILL)
            return
        try:
            if _belongs(pid, run_id, pods):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
