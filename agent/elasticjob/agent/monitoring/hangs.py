"""Workers that make no progress: noticed at a deadline, and where they stand by then.

Nothing polls: workers write the time of their last step into memory, and this process looks there when the deadline
of the oldest one has come. A worker counts from its first step on.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticjob.agent.monitoring.worker_progress import ProgressReport
from elasticjob.contract.messages import Failure, FailureClass
from elasticjob.contract.names import STACK_DUMP_SIGNAL

STACKS_TIMEOUT = 0.3
"""Seconds that workers have to write their stacks; one that is stopped, or stuck in the kernel, never does."""
STACKS_INTERVAL = 0.02
"""Seconds between looks at what they have written."""
MAX_STACKS = 16384
"""Bytes kept of each worker's stacks."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WAITS = re.compile(r"/torch/(?!utils/data/)")


class HangMonitor:
    """Calls `stalled` once no worker that ever made a step has made one for the timeout."""

    def __init__(self, signs: Callable[[], Sequence[ProgressReport]], stalled: Callable[[], None]) -> None:
        """`signs`: the last sign of life of every running worker that has given one."""
        self._signs = signs
        self._stalled = stalled
        self._again = False
        self._told: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, timeout: float, *, again: bool = False) -> None:
        """Watch a round that has begun; 0: do not. `again`: go on after a standstill, for one after new progress."""
        self.stop()
        self._again, self._told = again, None
        if timeout > 0:
            self._wait(timeout, timeout)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float, timeout: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look, timeout)

    def _look(self, timeout: float) -> None:
        now = time.monotonic()
        # Who gives the first sign after this look cannot be late before the next one.
        oldest = min((sign.time for sign in self._signs()), default=now)
        left = oldest + timeout - now
        if left > 0:
            self._wait(left, timeout)
            return
        self._timer = None
        if self._again:
            self._wait(timeout, timeout)  # nobody who makes progress from now on is late before
        if oldest != self._told:
            self._told = oldest
            self._stalled()


@dataclass(frozen=True)
class StackDump:
    """A worker at the moment of a hang. `stacks` is empty where it did not answer."""

    rank: int
    step: int | None
    """The last that it reported; None before the first."""
    age: float
    """Seconds since then."""
    stacks: str

    @property
    def waits_for_peers(self) -> bool:
        """Whether its main thread stands within torch, as the peers of a worker that stands still do."""
        frame = _FRAME.search(self.main_thread)
        return frame is not None and _WAITS.search(frame[1]) is not None

    @property
    def main_thread(self) -> str:
        """The main thread: the last that faulthandler shows."""
        return self.stacks[self.stacks.rfind("hread 0x") :]

    def failure(self, pod: str, now: float) -> Failure:
        """As the coordinator hears of it."""
        frame = _FRAME.search(self.main_thread)
        place = "outside of Python code" if self.stacks else "and does not answer"
        if frame is not None:
            place = f"in {frame[3]} ({frame[1]}:{frame[2]})"
        after = f"step {self.step}" if self.step is not None else "its start"
        message = f"no progress for {self.age:.1f} s after {after}: stands {place}\n{self.main_thread}"
        return Failure(
            FailureClass.HANG,
            pod,
            now,
            rank=self.rank,
            message=message[:1024],
            step=self.step,
            waits_for_peers=self.waits_for_peers,
        )


def farthest_behind(standing: Sequence[StackDump]) -> StackDump | None:
    """The worker to name: of the lowest step, and of those rather one that does not wait for others."""
    known = [s for s in standing if s.step is not None]
    return min(known, key=lambda s: (s.step, s.waits_for_peers, s.rank), default=None)


async def dump_stacks(files: Mapping[int, str]) -> dict[int, str]:
    """What each process (by id) writes into its file when it is asked; empty for one that does not listen."""
    asked = [pid for pid in files if _listens(pid)]
    before = {pid: _size(files[pid]) for pid in asked}
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_DUMP_SIGNAL)
    deadline, last = time.monotonic() + STACKS_TIMEOUT, dict(before)
    while asked and time.monotonic() < deadline:
        await asyncio.sleep(STACKS_INTERVAL)
        sizes = {pid: _size(files[pid]) for pid in asked}
        if sizes == last and all(sizes[pid] > before[pid] for pid in asked):
            break
        last = sizes
    return {pid: _read(files[pid], before[pid]) if pid in before else "" for pid in files}


def _listens(pid: int) -> bool:
    """Whether the process catches the signal: it would die of it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (STACK_DUMP_SIGNAL - 1) & 1)


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _read(path: str, start: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(MAX_STACKS).decode(errors="replace")
    except OSError:
        return ""
