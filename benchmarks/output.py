"""Collect the output lines of processes with their times, and the events that the training scripts print."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from elasticjob._runtime.agent.processes import die_with_parent

_EVENT = re.compile(
    r"(begun|imported|raising|stopped|step=(\d+)) rank=(\d+) world=(\d+) pid=(\d+)(?: call=(\d+))? at=([\d.]+)"
)


@dataclass(frozen=True)
class Line:
    """One output line. `time`: Unix seconds when it was read. `source`: the process that wrote it."""

    time: float
    source: str
    text: str


@dataclass(frozen=True)
class ScriptEvent:
    """A line of a script. `time`: Unix seconds, as printed. `step`: 0 unless the event is a step."""

    kind: str
    """`begun`, `imported`, `step`, `raising` or `stopped`."""
    step: int
    rank: int
    world: int
    pid: int
    time: float
    call: int = 1
    """How often the process has called its training function, this time included."""

    @property
    def worker(self) -> tuple[int, int]:
        """What takes part in one round only: a call in a process."""
        return self.pid, self.call


class Output:
    """The lines and events of several processes."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.events: list[ScriptEvent] = []
        self._changed = threading.Condition()

    def follow(self, source: str, stream: IO[bytes]) -> None:
        """Read a stream to its end in a thread."""
        threading.Thread(target=self._read, args=(source, stream), daemon=True).start()

    def _read(self, source: str, stream: IO[bytes]) -> None:
        for raw in stream:
            now, text = time.time(), raw.decode(errors="replace").rstrip()
            match = _EVENT.search(text)
            with self._changed:
                self.lines.append(Line(now, source, text))
                if match:
                    kind, step, rank, world, pid, call, at = match.groups()
                    name, numbers = kind.partition("=")[0], (int(step or 0), int(rank), int(world), int(pid))
                    self.events.append(ScriptEvent(name, *numbers, float(at), int(call or 1)))
                self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout: float, aborted: Callable[[], bool] | None = None) -> bool:
        """Wait and return whether `condition` holds within `timeout` seconds and before `aborted` holds."""
        end = time.monotonic() + timeout
        with self._changed:
            while not condition():
                left = end - time.monotonic()
                if left <= 0 or (aborted is not None and aborted()):
                    return False
                self._changed.wait(min(left, 0.5))
        return True

    def wait_for_silence(self, seconds: float) -> None:
        """Wait until no process has written a line for `seconds`."""
        with self._changed:
            while self._changed.wait(seconds):
                pass

    def steps(
        self, *, excluding: frozenset[tuple[int, int]] = frozenset(), world: int = 0, after: float = 0.0, since: int = 0
    ) -> list[ScriptEvent]:
        """Return the steps in order of time, without those of the workers `excluding`.

        `world`: only of this world size; 0: of any. `after`: only after this time (Unix seconds). `since`: the number
        of events to skip.
        """
        found = (
            s for s in self.events[since:]
            if s.step and s.worker not in excluding and world in (0, s.world) and s.time > after
        )  # fmt: skip
        return sorted(found, key=lambda s: s.time)

    def workers(self) -> frozenset[tuple[int, int]]:
        """Return all workers that have printed an event."""
        return frozenset(s.worker for s in list(self.events))

    def pid_of(self, rank: int) -> int:
        """Return the process id of the newest worker of this rank."""
        return next(s.pid for s in reversed(list(self.events)) if s.rank == rank)

    def tail(self, count: int = 15) -> str:
        return "\n".join(f"{line.source}: {line.text}" for line in self.lines[-count:])


def spawn(argv: list[str], env: dict[str, str], output: Output, source: str, folder: str) -> subprocess.Popen[bytes]:
    """Start a process in its own session and collect its output."""
    process = subprocess.Popen(
        argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert process.stdout is not None
    output.follow(source, process.stdout)
    return process
