"""Build a `Failure` from what is known of a worker's end: exit code, error file, last lines, OOM kills."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.failures.failure_text import MAX_MESSAGE, describe_out_of_memory, describe_size
from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob._runtime.contract.names import script_returned_file, success_recorded_file
from elasticjob._runtime.contract.shared_memory.untrusted_file import read_regular_file
from elasticjob._runtime.diagnosis import classify, innermost_place

LAST_LINES = 5
"""How many lines of standard error become the message of a worker that died without an exception."""
LAST_LINES_WIDTH = 500
"""Characters of all these lines together."""
_MAX_ERROR_FILE = 16 << 20
"""Bytes that are read of an error file. The text of an exception may be the repr of a large object, and the file has it
twice."""
_MAX_NOTE = 256
"""Bytes that are read of the notes that a forked worker writes next to its error file."""


@dataclass(frozen=True)
class WorkerExit:
    """What is known of the end of one worker."""

    rank: int
    code: int
    """The exit code; negative for a signal."""
    time: float
    """Unix seconds."""
    exception: tuple[str, str] | None = None
    """Type name and text, from the error file or the last traceback; None when there was none."""
    lines: Sequence[str] = ()
    """The last lines of standard error."""
    output: Sequence[str] = ()
    """The last lines of standard output. Used only to classify a worker that wrote nothing to standard error."""
    oom_killed: bool = False
    """Whether the kernel's OOM killer has killed a process of this container that no other worker's end explains."""
    memory_limit: int | None = None
    """Memory limit of this container in bytes; 0: it has none; None: unknown."""
    place: str = ""
    """Where the exception was raised, such as `train.py, line 12`; empty if unknown."""


def failure_of(evidence: WorkerExit, pod: str) -> Failure:
    """Return the failure that the agent reports to the coordinator."""
    name = signal_name(-evidence.code) if evidence.code < 0 else ""
    exception, evident = evidence.exception or ("", "\n".join(evidence.lines or evidence.output))
    message = (
        _with_place(_with_name(evident, exception), evidence.place)
        if evidence.exception
        else last_lines(evidence.lines)
    )
    exit_code = evidence.code if evidence.code > 0 else None
    kind = classify(exit_code, name, exception, evident, oom_killed=evidence.oom_killed)
    if kind is FailureClass.OOM_KILLED:
        message = f"{_out_of_memory(evidence.memory_limit)}\n{message}".rstrip()
    return Failure(
        kind=kind,
        pod=pod,
        time=evidence.time,
        rank=evidence.rank,
        exit_code=exit_code,
        signal=name,
        exception=exception,
        message=message[:MAX_MESSAGE],
        # The text of a worker proves nothing: its driver may not be ready yet, or its log quotes another pod's message.
        suspected=kind is FailureClass.DEVICE_UNHEALTHY,
    )


def _with_name(text: str, exception: str) -> str:
    """Return the text of an exception, with its name as first line if that is blank."""
    first, _, rest = text.partition("\n")
    return text if first.strip() else f"{exception}\n{rest}".strip()


def _with_place(text: str, place: str) -> str:
    """Return the text of an exception with the place at the end of its first line, unless it is there already."""
    first, newline, rest = text.partition("\n")
    if not place or first.endswith(f"({place})"):
        return text
    room = MAX_MESSAGE - len(place) - 3
    return f"{first[:room]} ({place}){newline}{rest}".lstrip()


def _out_of_memory(limit: int | None) -> str:
    return describe_out_of_memory(describe_size(limit) if limit else "", unlimited=limit == 0)


def last_lines(lines: Sequence[str]) -> str:
    """Return the last few lines that are not blank. Only whole lines, except that a very long last line is cut."""
    found: list[str] = []
    left = LAST_LINES_WIDTH
    for line in reversed([line.rstrip() for line in lines if line.strip()][-LAST_LINES:]):
        if found and len(line) >= left:
            break
        found.insert(0, line[-LAST_LINES_WIDTH:])
        left -= len(line) + 1
    return "\n".join(found)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class ErrorFile(NamedTuple):
    """An exception in torch's error file."""

    name: str
    """Its type; empty if the text does not start with one."""
    text: str
    time: float
    """Unix time of the file."""
    place: str
    """As `WorkerExit.place`."""


def read_error_file(path: str) -> ErrorFile | None:
    """Return the exception in torch's error file; None if absent or malformed."""
    try:
        content, written = read_regular_file(path, _MAX_ERROR_FILE)
        data = codec.loads(content)
    except (OSError, ValueError):
        return None
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    if not isinstance(text, str):
        return None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    trace = extra.get("py_callstack") if isinstance(extra, dict) else None
    place = innermost_place(trace) if isinstance(trace, str) else ""
    name, _, rest = text.partition(": ")
    return ErrorFile(name, rest, written, place) if name.isidentifier() else ErrorFile("", text, written, place)


def script_succeeded(error_file: str, pid: int) -> bool:
    """Return whether this process recorded that its script has succeeded: only its clean-up can fail after that."""
    try:
        return read_regular_file(success_recorded_file(error_file), _MAX_NOTE).data == str(pid).encode()
    except OSError:
        return False


def left_at(error_file: str, pid: int) -> float | None:
    """Return when this process recorded that its script had succeeded, in Unix seconds; None if it recorded nothing."""
    try:
        recorded, _, seconds = read_regular_file(script_returned_file(error_file), _MAX_NOTE).data.partition(b" ")
        return float(seconds) if recorded == str(pid).encode() else None
    except (OSError, ValueError):
        return None


def reported_exception(code: int, last: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return the `last` exception on standard error if it ended the worker, None otherwise.

    A worker that was ended by a signal may have handled the exception before. There is one exception that Python itself
    turns into a signal: after an unhandled KeyboardInterrupt it ends by SIGINT.
    """
    if code > 0 or (code == -signal.SIGINT and last is not None and last[0] == "KeyboardInterrupt"):
        return last
    return None


def read_torchrun_report(lines: Iterable[str]) -> tuple[int, int] | None:
    """Return (global rank, exit code) of the root cause in the failure report of a torchrun; None without one."""
    lines = list(lines)
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("Root Cause (first observed failure):"):
            report = "\n".join(lines[start:])
            rank = re.search(r"^ +rank +: (\d+)", report, re.M)
            code = re.search(r"^ +exitcode +: (-?\d+)", report, re.M)
            return (int(rank[1]), int(code[1])) if rank and code else None
    return None


OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Files of cgroup v2 and v1 where a container sees its own cgroup. Both have a line `oom_kill N`: kills so far."""


class OomCounter:
    """Counts OOM kills in this container, and assigns each to one worker's end.

    cgroup v1 kills one process. cgroup v2 may kill the whole container with its agent: then only the pod's status says
    OOMKilled.
    """

    def __init__(self, files: Sequence[str] = OOM_FILES) -> None:
        self._files = files
        self._claimed = self._count()

    @property
    def unclaimed(self) -> bool:
        """Whether a kill is not assigned to a worker's end yet."""
        return self._count() > self._claimed

    def claim(self) -> None:
        """Assign one kill to a worker's end."""
        self._claimed += 1

    def reset(self) -> None:
        """Ignore all kills so far."""
        self._claimed = self._count()

    def _count(self) -> int:
        for path in self._files:
            try:
                words = Path(path).read_text().split()
                return int(words[words.index("oom_kill") + 1])
            except (OSError, ValueError, IndexError):
                continue
        return 0
