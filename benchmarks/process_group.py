"""What forming one process group asks of its store: our round's store against torch's C++ server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.crowd import cpu_seconds
from benchmarks.output import Output, spawn
from benchmarks.row import OURS, Row, Sample
from benchmarks.store_operations import TORCH
from elasticjob._runtime.store.open_files import raise_open_file_limit

ROOT = Path(__file__).parents[1]
CAP = 1800.0
"""Time limit of a sample, in seconds."""


_TORCH_STORE = """
import socket, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
# On a socket for IPv6 as well, torch's server stalled for 5 s again and again, probably in lookups of peers' names.
listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
port = listener.getsockname()[1]
store = TCPStore(
    "127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener.detach()
)
print("serving", port, flush=True)
while True:
    time.sleep(3600)
"""


@contextmanager
def serving(argv: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Start a store; yield its port and its process id."""
    output = Output()
    process = spawn([sys.executable, *argv], dict(os.environ), output, "store", str(ROOT))
    try:
        if not output.wait(lambda: bool(output.lines), 60):
            raise RuntimeError("the store does not serve")
        yield int(output.lines[-1].text.split()[1]), process.pid
    finally:
        process.kill()
        process.wait()


def _row(backend: str, ranks: int, repeat: int, seconds: float) -> Row:
    def measure(store: Sequence[str]) -> Callable[[Path], Sample]:
        def once(_: Path) -> Sample:
            raise_open_file_limit()
            with serving(store) as (port, pid):
                before = cpu_seconds(pid)
                argv = [sys.executable, "-m", "benchmarks.group_ranks", backend, str(ranks), str(port)]
                done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=CAP, check=False)
                used = cpu_seconds(pid) - before
            if done.returncode:
                return Sample(None, done.stderr.strip()[-300:])
            return Sample(used, parts=json.loads(done.stdout))

        return once

    title = f"store: processor time to form one process group of {ranks:,} ranks over {backend}"
    sides = {OURS: measure(["-m", "benchmarks.round_store"]), TORCH: measure(["-c", _TORCH_STORE])}
    note = "On machines of their own the ranks wait about as long: both servers use one processor."
    return Row(f"group-{backend}-{ranks}", title, "s", None, sides, dict.fromkeys(sides, repeat), seconds, note=note)


ROWS = [
    _row("gloo", 1_000, 1, 300),  # three million requests, each after an answer
    _row("nccl", 1_000, 5, 20),
    _row("nccl", 20_000, 3, 120),
]
