"""Run a command with a time limit, and pass on its output line by line."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.side import kill_session

Show = Callable[[str], None]
"""Gets each line of an output."""

_running: set[int] = set()
_stopped = threading.Event()


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    problem: str
    """Empty if it has succeeded."""
    text: str
    """Its output."""
    seconds: float


def run(command: Sequence[str], limit: float, environ: Mapping[str, str] | None = None, show: Show = print) -> Ended:
    """Run a command to its end. After `limit` seconds it is killed, with all processes that it has started.

    `environ`: variables besides those of this process. `show` gets each line of its output.
    """
    if _stopped.is_set():
        return Ended("was not begun", "", 0.0)
    begun = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    _running.add(process.pid)
    late = threading.Event()

    def end() -> None:
        late.set()
        kill_session(process.pid)

    timer = threading.Timer(limit, end)
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            show(lines[-1])
        code = process.wait()
    finally:
        timer.cancel()
        _running.discard(process.pid)
        if process.poll() is None:  # an interruption
            kill_session(process.pid)
            process.wait()
    problem = f"did not end within {limit:.0f} s" if late.is_set() else f"exit code {code}" if code else ""
    return Ended(problem, "\n".join(lines), time.monotonic() - begun)


def stop() -> None:
    """Kill what `run` runs in any thread, and begin nothing more: an interruption reaches the main thread only."""
    _stopped.set()
    for pid in list(_running):
        kill_session(pid)
