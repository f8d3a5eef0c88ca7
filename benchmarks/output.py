"""What processes say, line by line, with the moment each line was read; and the steps in it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from elasticjob.agent.processes import die_with_parent

_SAID = re.compile(r"(begun|imported|raising|stopped|step=(\d+)) rank=(\d+) world=(\d+) pid=(\d+) at=([\d.]+)")


@dataclass(frozen=True)
class Line:
    """`time`: Unix seconds when it was read. `who` wrote it."""

    time: float
    who: str
    text: str


@dataclass(frozen=True)
class Said:
    """A line of `train.py`. `time`: Unix seconds by its own clock. `step`: 0 where it is none."""

    what: str
    step: int
    rank: int
    world: int
    pid: int
    time: float


class Output:
    """Collects lines of many processes."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.said: list[Said] = []
        self._news = threading.Condition()

    def follow(self, who: str, stream: IO[bytes]) -> None:
        """Read a stream to its end, in a thread."""
        threading.Thread(target=self._read, args=(who, stream), daemon=True).start()

    def _read(self, who: str, stream: IO[bytes]) -> None:
        for raw in stream:
            now, text = time.time(), raw.decode(errors="replace").rstrip()
            match = _SAID.search(text)
            with self._news:
                self.lines.append(Line(now, who, text))
                if match:
                    what, step, rank, world, pid, at = match.groups()
                    said = Said(what.partition("=")[0], int(step or 0), int(rank), int(world), int(pid), float(at))
                    self.said.append(said)
                self._news.notify_all()

    def wait(self, condition: Callable[[], bool], timeout: float, given_up: Callable[[], bool] | None = None) -> bool:
        """Whether `condition` came to hold within `timeout` seconds, and before `given_up` did."""
        end = time.monotonic() + timeout
        with self._news:
            while not condition():
                left = end - time.monotonic()
                if left <= 0 or (given_up is not None and given_up()):
                    return False
                self._news.wait(min(left, 0.5))
        return True

    def quiet(self, seconds: float) -> None:
        """Wait until nobody has said anything for so long."""
        with self._news:
            while self._news.wait(seconds):
                pass

    def steps(self, *, besides: frozenset[int] = frozenset(), world: int = 0, after: float = 0.0) -> list[Said]:
        """Steps of processes other than `besides`, of a world of this size (0: any), after a moment; in order."""
        found = (
            s for s in list(self.said)
            if s.step and s.pid not in besides and world in (0, s.world) and s.time > after
        )  # fmt: skip
        return sorted(found, key=lambda s: s.time)

    def pids(self) -> frozenset[int]:
        """Every worker that has spoken so far."""
        return frozenset(s.pid for s in list(self.said))

    def pid_of(self, rank: int) -> int:
        """The newest worker of this rank."""
        return next(s.pid for s in reversed(list(self.said)) if s.rank == rank)

    def tail(self, count: int = 15) -> str:
        return "\n".join(f"{line.who}: {line.text}" for line in self.lines[-count:])


def spawn(argv: list[str], env: dict[str, str], output: Output, who: str, folder: str) -> subprocess.Popen[bytes]:
    """A process in its own session whose output is collected."""
    process = subprocess.Popen(
        argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert process.stdout is not None
    output.follow(who, process.stdout)
    return process
