"""Detect workers that make no progress, and dump their stacks.

Nothing polls: workers write the time of their last step into shared memory, and the agent reads it at the deadline of
the oldest one.
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

from elasticjob._runtime.agent.processes import has_signal, is_stopped
from elasticjob._runtime.contract.failures.failure_text import MAX_MESSAGE
from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob._runtime.contract.names import STACK_DUMP_SIGNAL
from elasticjob._runtime.contract.shared_memory.untrusted_file import read_regular_file
from elasticjob._runtime.diagnosis import own_file

STACKS_TIMEOUT = 0.3
"""Seconds that workers have to write their stacks. A process that is stuck in the kernel does not write any."""
STACKS_INTERVAL = 0.002
"""Seconds between two checks whether all workers have written their stacks."""
STACKS_SETTLED = 0.02
"""A process has written its stacks if its file has not grown for so many seconds. Used only if the end of its signal
handler cannot be seen, because it blocks the signal."""
PATIENT_SECONDS = 600.0
"""After a shorter time-out than this without any step, a script gets the same time once more before it counts as one
that reports none: a first step may take far longer than the others, because modules load and graphs compile."""
MAX_STACKS = 16384
"""Bytes kept of each worker's stacks."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STARTS_PROGRAM = "_runtime/agent/start_workers/fork_server/"
"""Folder of the fork server in this package. In the stack of a fork, its frames and those of its callers are below the
frames of the program."""
_CONNECTS = "inprocess/"
"""Folder of this package whose code waits for torch's connections."""
_WAITING_FILE = re.compile(r"/torch/(?!utils/data/)")
"""Files of torch, except for its data loader: that one waits for processes of its own pod."""


class HangMonitor:
    """Calls `timed_out` when a worker that is monitored makes no step within the timeout."""

    def __init__(
        self,
        last_steps: Callable[[], Sequence[float]],
        timed_out: Callable[[], None],
        watches: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`last_steps` returns when each running worker that is monitored made its last step; monotonic time.

        `watches` is called at checks, with 0 if a worker is monitored, else with the seconds in which no worker made a
        step once these are too many.
        """
        self._last_steps = last_steps
        self._timed_out = timed_out
        self._watches = watches
        self._unwatched = 0.0
        """Seconds since the start in which no worker was monitored."""
        self._repeat = False
        self._reported: float | None = None
        """Time of the step that the last call was for."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, timeout: float, *, repeat: bool = False) -> None:
        """Monitor a round that begins; a timeout of 0 disables the monitor.

        `repeat`: continue after a hang, and report the next one once the workers have made progress.
        """
        self.stop()
        self._repeat, self._reported, self._unwatched = repeat, None, 0.0
        if timeout > 0:
            self._wait(timeout, timeout)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float, timeout: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check, timeout)

    def _check(self, timeout: float) -> None:
        now = time.monotonic()
        steps = self._last_steps()
        self._unwatched = 0.0 if steps else self._unwatched + timeout
        if steps or self._unwatched >= min(2 * timeout, PATIENT_SECONDS):
            self._watches(self._unwatched)
        oldest = min(steps, default=now)
        # A worker whose first step comes after this check cannot be late before the next one.
        left = min(oldest, now) + timeout - now
        if left > 0:
            self._wait(left, timeout)
            return
        self._timer = None
        if self._repeat:
            self._wait(timeout, timeout)  # a worker that makes progress after this check cannot be late before then
        if oldest != self._reported:
            self._reported = oldest
            self._timed_out()


@dataclass(frozen=True)
class StackDump:
    """A worker at the moment of a hang."""

    rank: int
    step: int | None
    """The last step that it made; None before the first."""
    age: float
    """Seconds since that step."""
    stacks: str
    """faulthandler's output for all threads; empty when the process wrote none."""
    log_step: int | None = None
    """The last step that the output of the pod's workers shows, where no worker reports its own. It says nothing of
    which rank is behind."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether the main thread is inside torch, as in all peers of a rank that hangs elsewhere."""
        frame = _FRAME.search(self.main_thread)
        if frame is None:
            return False
        return _WAITING_FILE.search(frame[1]) is not None or own_file(frame[1]).startswith(_CONNECTS)

    @property
    def main_thread(self) -> str:
        """The stack of the main thread, which faulthandler writes last."""
        return _main_thread(self.stacks)

    def failure(self, pod: str, now: float, guard: str = "") -> Failure:
        """Return the failure that the agent reports to the coordinator.

        `guard`: what has ended the round, if the job has no hangPolicy.
        """
        place = _place(self.stacks) or "the process does not respond"
        step = self.log_step if self.step is None else self.step
        after = f"step {step}" if step is not None else "its start"
        first = "; ".join(filter(None, (f"no progress for {self.age:.1f} s after {after}: {place}", guard)))
        message = f"{first}\n{users_frames(self.main_thread)}".rstrip()
        return Failure(
            FailureClass.HANG,
            pod,
            now,
            rank=self.rank,
            message=cut_at_line(message, MAX_MESSAGE),
            step=self.step,
            waits_for_peers=self.waits_for_peers,
        )


def _main_thread(stacks: str) -> str:
    return stacks[stacks.rfind("\n", 0, max(0, stacks.rfind("hread 0x"))) + 1 :]


def _place(stacks: str) -> str:
    """Return where the main thread is; empty without stacks."""
    if frame := _FRAME.search(_main_thread(stacks)):
        return f"main thread is in {frame[3]} ({frame[1]}:{frame[2]})"
    return "main thread is outside of Python code" if stacks else ""


def describe_place(stacks: str, pid: int) -> str:
    """Return where a process is, by its stacks; by what the kernel says if it has written none."""
    if stacks:
        return f"{_place(stacks)}\n{users_frames(_main_thread(stacks))}".rstrip()
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        wait = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "it has ended"
    state = status.partition("\nState:")[2].split("\n", 1)[0].strip()
    return f"it writes no stacks; its main thread: {state}" + (
        f", in {wait} of the kernel" if wait not in ("", "0") else ""
    )


def users_frames(stack: str) -> str:
    """Return a thread's stack without elasticjob's frames, and without those that started the user's program.

    The stack is returned whole if no other frame is in it.
    """
    kept: list[str] = []
    for line in stack.splitlines():
        frame = _FRAME.match(line)
        if frame is not None and own_file(frame[1]).startswith(_STARTS_PROGRAM):
            break
        if frame is None or not own_file(frame[1]):
            kept.append(line)
    return "\n".join(kept) if any(map(_FRAME.match, kept)) else stack


def cut_at_line(text: str, length: int) -> str:
    """Return the first lines of a text that are at most `length` characters; of the first line, its beginning."""
    if len(text) <= length:
        return text
    whole = text[: length + 1].rpartition("\n")[0]
    return whole or text[:length]


def farthest_behind(dumps: Sequence[StackDump]) -> StackDump | None:
    """Return the worker with the lowest step, preferring one that does not wait for peers.

    A worker without a step is named only if all are: its script may report none. None: there are no workers.
    """
    return min(dumps, key=lambda d: (d.step is None, d.step or 0, d.waits_for_peers, d.rank), default=None)


async def dump_stacks(files: Mapping[int, str]) -> dict[int, str]:
    """Signal each process and return its stacks, by process id; empty for a process that writes none in time.

    `files`: the stack dump file of each process, by process id.
    """
    asked = [pid for pid in files if _catches_signal(pid) and not is_stopped(pid)]
    before = {pid: _size(files[pid]) for pid in asked}
    blocking = any(map(_handles_signal, asked))  # then other threads handle it
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_DUMP_SIGNAL)
    deadline, last = time.monotonic() + STACKS_TIMEOUT, dict(before)
    while asked and time.monotonic() < deadline:
        await asyncio.sleep(STACKS_SETTLED if blocking else STACKS_INTERVAL)
        handling = any(map(_handles_signal, asked))
        sizes = {pid: _size(files[pid]) for pid in asked}
        complete = sizes == last if blocking else not handling
        if complete and all(sizes[pid] > before[pid] for pid in asked):
            break
        last = sizes
    return {pid: read_from(files[pid], before[pid]) if pid in before else "" for pid in files}


def _catches_signal(pid: int) -> bool:
    """Return whether the process has a handler for the signal, which would kill it otherwise."""
    return has_signal(pid, STACK_DUMP_SIGNAL, "SigCgt")


def _handles_signal(pid: int) -> bool:
    """Return whether the signal waits for the main thread, or its handler runs there, which blocks the signal."""
    return has_signal(pid, STACK_DUMP_SIGNAL, "SigPnd", "ShdPnd", "SigBlk")


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def read_from(path: str, start: int) -> str:
    try:
        return read_regular_file(path, MAX_STACKS, start).data.decode(errors="replace")
    except OSError:
        return ""
