"""`elasticjob run` on a terminal: a table that stays, and keys that do things to the run."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from support.local_run import PROGRAM, manifest

WAIT = """
import os, sys, time
print("started", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A run with a person in front of it: `press` keys, wait until something is on the screen."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        (folder / "wait.py").write_text(WAIT)
        job = manifest([sys.executable, str(folder / "wait.py"), str(folder / "done")], **spec)
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        self._ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self._process = subprocess.Popen(
            [*PROGRAM, "run", "job.yaml"],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"},
        )  # fmt: skip
        self.screen, self._seen = "", 0
        self._more = threading.Condition()
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
        os.write(self._ours, key.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, pattern: str) -> None:
        """Look at what has come to the screen since the last match."""

        def found() -> re.Match[str] | None:
            return re.compile(pattern).search(self.screen, self._seen)

        with self._more:
            assert self._more.wait_for(found, 60), f"no {pattern!r} on the screen:\n{self.screen[self._seen :]}"
            match = found()
            assert match is not None
            self._seen = match.end()

    def exit_code(self) -> int:
        return self._process.wait(60)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                return
            with self._more:
                self.screen += _ESCAPES.sub("", data.decode(errors="replace"))
                self._more.notify_all()


def test_a_table_shows_the_nodes_and_keys_kill_and_scale(tmp_path: Path) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 3, "scaleUpStabilizationSeconds": 0}
    with Terminal(tmp_path, replicas=2, elasticPolicy=policy) as terminal:
        terminal.wait_for(r"toy: Running +2 of 2 nodes, 2 workers +round 1\.0\.1 +restarts 0")
        terminal.wait_for(r"1 +toy-1-0 +\d+ +in the round")
        terminal.press("1")
        terminal.wait_for("toy-1-0 ended .SIGKILL.; toy-1-1 takes its place")
        terminal.wait_for(r"toy: Running +2 of 2 nodes")
        terminal.press("+")
        terminal.wait_for(r"started \d of 3")
        terminal.wait_for(r"toy: Running +3 of 3 nodes")
        terminal.press("-")
        terminal.wait_for(r"toy: Running +2 of 2 nodes, 2 workers")
        terminal.press("s")
        terminal.wait_for("the store ended .SIGKILL.; starting it again")
        (tmp_path / "done").touch()
        terminal.wait_for("toy succeeded; 0 restarts")
        assert terminal.exit_code() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_ctrl_c_once_drains(tmp_path: Path) -> None:
    with Terminal(tmp_path, replicas=2) as terminal:
        terminal.wait_for("started 1 of 2")
        terminal.interrupt()
        terminal.wait_for("the nodes leave; once more kills them")
        terminal.wait_for("toy was interrupted")
        assert terminal.exit_code() == 130
        assert termios.tcgetattr(terminal.theirs) == terminal.before
