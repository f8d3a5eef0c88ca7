"""What a worker left behind, turned into a `Failure`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticjob.contract.messages import Failure
from elasticjob.diagnosis import classify

MAX_MESSAGE = 1024
_MAX_ERROR_FILE = 1 << 20


@dataclass(frozen=True)
class WorkerExit:
    """One ended worker. `code` is negative for a signal; `recorded` is what `@record` or the warm fork wrote."""

    rank: int
    code: int
    time: float
    exception: tuple[str, str] | None = None
    """Type name and text."""
    lines: Sequence[str] = ()
    oom_killed: bool = False
    """Whether the kernel has killed for memory here, and no other worker's end accounts for it."""


def failure_of(evidence: WorkerExit, pod: str) -> Failure:
    """The failure as the coordinator hears of it."""
    name = signal_name(-evidence.code) if evidence.code < 0 else ""
    exception, message = evidence.exception or ("", "\n".join(evidence.lines)[-MAX_MESSAGE:])
    exit_code = evidence.code if evidence.code > 0 else None
    return Failure(
        kind=classify(exit_code, name, exception, message, oom_killed=evidence.oom_killed),
        pod=pod,
        time=evidence.time,
        rank=evidence.rank,
        exit_code=exit_code,
        signal=name,
        exception=exception,
        message=message[:MAX_MESSAGE],
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def read_error_file(path: str) -> tuple[str, str, float] | None:
    """(exception type, text, time it was written) from torch's error file; None where there is none worth reading."""
    try:
        with open(path, "rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            data = json.loads(file.read(_MAX_ERROR_FILE))
    except (OSError, ValueError):
        return None
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    if not isinstance(text, str):
        return None
    name, _, rest = text.partition(": ")
    return (name, rest, written) if name.isidentifier() else ("", text, written)


def read_torchrun_report(lines: Iterable[str]) -> tuple[int, int] | None:
    """(global rank, exit code) of the worker that a torchrun names as its root cause in its last lines."""
    lines = list(lines)
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("Root Cause (first observed failure):"):
            report = "\n".join(lines[start:])
            rank, code = (
                re.search(r"^ +rank +: (\d+)", report, re.M),
                re.search(r"^ +exitcode +: (-?\d+)", report, re.M),
            )
            return (int(rank[1]), int(code[1])) if rank and code else None
    return None


OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Of cgroup v2 and v1; a container sees its own cgroup there. Both count kills in a line `oom_kill N`."""


class OomCounter:
    """Processes that the kernel killed for memory in this container, each to account for one worker's end.

    v1 kills one process; v2 may kill the whole container (then nobody asks here, and the pod says OOMKilled).
    """

    def __init__(self, files: Sequence[str] = OOM_FILES) -> None:
        self._files = files
        self._seen = self._count()

    @property
    def unclaimed(self) -> bool:
        """Whether a kill is not accounted for yet."""
        return self._count() > self._seen

    def claim(self) -> None:
        """One of them is."""
        self._seen += 1

    def reset(self) -> None:
        """What was killed so far has nothing to do with what ends from now on."""
        self._seen = self._count()

    def _count(self) -> int:
        for path in self._files:
            try:
                words = Path(path).read_text().split()
                return int(words[words.index("oom_kill") + 1])
            except (OSError, ValueError, IndexError):
                continue
        return 0
