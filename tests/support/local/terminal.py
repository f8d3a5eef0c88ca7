"""`elasticjob run` on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import termios
import threading
from pathlib import Path
from types import TracebackType

import yaml

from support.local.run import PROGRAM

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A run with a keyboard and a screen. `press` types keys, `wait_for` searches the screen."""

    def __init__(self, folder: Path, job: dict[str, object]) -> None:
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        self._master, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self._process = subprocess.Popen(
            [*PROGRAM, "run", "job.yaml"],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"},
        )  # fmt: skip
        self.screen, self._searched = "", 0
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self.theirs)

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, pattern: str) -> None:
        """Wait until the pattern is on the screen after the last match, within one line."""
        begin = self._searched

        def found() -> re.Match[str] | None:
            nonlocal begin
            match = re.compile(pattern).search(self.screen, begin)
            begin = max(begin, self.screen.rfind("\n") + 1)  # a reader that searches all again is slower than the run
            return match

        with self._changed:
            match = self._changed.wait_for(found, 60)
            assert match is not None, f"no {pattern!r} on the screen:\n{self.screen[self._searched :]}"
            self._searched = match.end()

    def exit_code(self) -> int:
        return self._process.wait(60)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            with self._changed:
                self.screen += _ESCAPES.sub("", data.decode(errors="replace"))
                self._changed.notify_all()
