"""Stock torchruns as child processes: several nodes on this machine, their output to wait for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

WORKER = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
line = " ".join(["trains", *(os.environ[n] for n in names), str(os.getpid())])
os.write(1, f"{line}\\n".encode())  # at once: the workers of a node share a pipe
while one.item() > 0:
    # All ranks stop at the same step: rank 0 has looked for all of them.
    one.fill_(0 if dist.get_rank() == 0 and os.path.exists(sys.argv[1]) else 1)
    dist.broadcast(one, 0)
    time.sleep(0.01)
dist.destroy_process_group()
"""
"""Trains until the file in its first argument exists; says where it trains."""


class Torchrun:
    """One node: a context manager around one `torchrun`."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._seen = 0
        self._more = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environ or {})},
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 90.0) -> re.Match[str]:
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
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout} s:\n{self.text}") from None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()


def script(folder: Path) -> Sequence[str]:
    """The worker script and the file that ends it, as arguments."""
    (folder / "worker.py").write_text(WORKER)
    return [str(folder / "worker.py"), str(folder / "done")]
