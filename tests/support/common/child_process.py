"""A child process whose output tests can wait for."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from support.common.torch_forks import StartFork

SHOWN_LINES = 300


class ChildProcess:
    """A context manager around one process. It collects the output lines; `wait_for` searches them in order."""

    wait_timeout = 180.0
    """Default of `wait_for` and `exit_code`, in seconds. It only ends a test that hangs."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        new_session: bool = False,
        fork: StartFork | None = None,
    ) -> None:
        """Start the process: by `fork`, if there is one, which takes `env` only."""
        self.lines: list[str] = []
        self._searched = 0
        self._changed = threading.Condition()
        self.process = fork(command, env or os.environ) if fork else subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=cwd, env=env,
            start_new_session=new_session,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        # pytest shows this with a test that failed.
        print("\n".join(["the last output of the process:", *self.lines[-SHOWN_LINES:]]))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float | None = None) -> re.Match[str]:
        """Return the match of the next line that matches; fail with the whole output if none comes in time."""
        deadline = time.monotonic() + (self.wait_timeout if timeout is None else timeout)
        with self._changed:
            while True:
                while self._searched < len(self.lines):
                    self._searched += 1
                    if match := re.search(pattern, self.lines[self._searched - 1]):
                        return match
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    raise AssertionError(f"no line like {pattern!r} in:\n{self.text}")
                self._changed.wait(min(left, 1.0))

    def exit_code(self, timeout: float | None = None) -> int:
        """Wait until the process ends and its output is complete, and return its exit code."""
        timeout = self.wait_timeout if timeout is None else timeout
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout} s:\n{self.text}") from None
        self._reader.join(timeout)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
