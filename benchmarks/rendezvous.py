"""Rendezvous of N simulated nodes on one store: ours over control links, torch's dynamic rendezvous in threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.row import OURS, SHIPPED, Row, Sample
from benchmarks.side import Size

LIMIT = {8: None, 32: None, 64: None, 128: 0.1, 1024: 0.5, 4096: 2.5}
"""The target of our side in seconds, by number of nodes. None: no target."""
CAP = 60.0
"""Time limit of a sample, in seconds."""


class EmptyStore(Ours):
    """A store that expects `size.high` nodes without starting them."""

    def crowd(self, *, quiet: float = 0.0) -> dict[str, float]:
        """Run `benchmarks.crowd` and return its figures and the store's memory afterwards (MiB).

        `quiet`: seconds for which the crowd counts messages of the idle job.
        """
        self.expect(self.size.high)
        self.start(0)
        self.wait_until_serving()
        assert self.store is not None
        environ = {
            **os.environ,
            **self.agent_environ(0),
            "BENCH_QUIET_SECONDS": str(quiet),
            "BENCH_STORE_PID": str(self.store.pid),
        }
        argv = [sys.executable, "-m", "benchmarks.crowd", str(self.size.high)]
        process = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=CAP + quiet, check=False)
        if process.returncode:
            raise RuntimeError(process.stderr.strip()[-300:])
        figures: dict[str, float] = json.loads(process.stdout)
        return figures | {"store MiB": memory(self.store.pid)}


def memory(pid: int) -> float:
    """Return the peak resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no VmHWM of {pid}")


def ours(nodes: int, figure: str) -> Callable[[Path], Sample]:
    def measure(folder: Path) -> Sample:
        with EmptyStore(folder, Size(nodes, nodes)) as store:
            figures = store.crowd()
        return Sample(figures.pop(figure), parts=figures)

    return measure


def stock(nodes: int, figure: str) -> Callable[[Path], Sample]:
    def measure(folder: Path) -> Sample:
        argv = [sys.executable, "-m", "benchmarks.stock_crowd", str(nodes), figure]
        try:
            process = subprocess.run(argv, capture_output=True, text=True, timeout=CAP, check=False)
        except subprocess.TimeoutExpired:
            return Sample(None, f"not within {CAP:g} s")
        if process.returncode:
            return Sample(None, process.stderr.strip()[-300:])
        figures: dict[str, float] = json.loads(process.stdout)
        return Sample(figures.pop(figure), parts=figures)

    return measure


def _row(figure: str, title: str, nodes: int, stock_limit: int) -> Row:
    sides = {OURS: ours(nodes, figure)}
    if nodes <= stock_limit:
        sides[SHIPPED] = stock(nodes, figure)
    repeat = {OURS: 5 if nodes < 1024 else 3, SHIPPED: 3}
    return Row(f"{figure}-{nodes}", title.format(nodes), "s", LIMIT[nodes], sides, repeat, 15 + nodes / 250)


ROWS = [
    *(_row("rendezvous", "rendezvous of {} nodes", nodes, 128) for nodes in LIMIT),
    *(_row("again", "re-rendezvous of {} running nodes", nodes, 64) for nodes in (64, 1024, 4096)),
]
