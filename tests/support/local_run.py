"""`elasticjob run` as a child process, with its output as something to wait for."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import yaml

PROGRAM = [sys.executable, str(Path(__file__).parents[2] / "agent" / "elasticjob")]


def manifest(command: Sequence[str], *, name: str = "toy", **spec: object) -> dict[str, object]:
    """An ElasticJob with one container."""
    template = {"spec": {"containers": [{"name": "trainer", "command": list(command)}]}}
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"preload": [], **spec, "template": template},
    }


class LocalRun:
    """A context manager; output lines are kept, and `wait_for` looks through those not yet looked at."""

    def __init__(self, job: dict[str, object], folder: Path, *args: str, within: Sequence[str] = ()) -> None:
        """`within`: a command that starts the one that follows it in its own place."""
        path = folder / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        self.lines: list[str] = []
        self._seen = 0
        self._more = threading.Condition()
        self._process = subprocess.Popen(
            [*within, *PROGRAM, "run", str(path), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_for(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        """The next line that matches; fails with all the output when it does not come."""
        deadline = time.monotonic() + timeout
        with self._more:
            while True:
                while self._seen < len(self.lines):
                    self._seen += 1
                    if match := re.search(pattern, self.lines[self._seen - 1]):
                        return match
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    raise AssertionError(f"no line like {pattern!r} in:\n{self.text}")
                self._more.wait(min(left, 1.0))

    def exit_code(self, timeout: float = 60.0) -> int:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout} s:\n{self.text}") from None
        self._reader.join(timeout)
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._more.notify_all()
