"""The other side: stock torchrun with its c10d backend, with default settings or the best that a user can choose."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks.ours import free_port
from benchmarks.output import Output, spawn
from benchmarks.side import TRAIN, Side, Size, kill, kill_session

_STAMP = re.compile(r"[IWE](\d{4} \d\d:\d\d:\d\d\.\d{6}) .*?\] (.*)")
_MARKS = {
    "detect": re.compile(r"will restart worker group|Received \w+ death signal"),
    "stop": re.compile(r"Rendezvous'ing worker group"),
    "rendezvous": re.compile(r"Rendezvous complete for workers"),
}
_STORE = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, timedelta(seconds=60), wait_for_workers=False)
print("serving", flush=True)
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True)
class Tuning:
    """The settings of torchrun that a user can choose."""

    arguments: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


DEFAULTS = Tuning()
TUNED = Tuning(
    arguments=("--monitor-interval=0.1",),
    conf={"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "2"},
    environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)


class Torchrun(Side):
    """A torchrun job. The first node hosts the store. `own_store`: a process of its own hosts it.

    `script`: with its arguments; `train.py` if it is empty.
    """

    def __init__(
        self, folder: Path, size: Size, tuning: Tuning, *, own_store: bool = False, script: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, size)
        self._script = list(script) or [TRAIN, str(folder)]
        self.name = "torchrun" if tuning is DEFAULTS else "torchrun, best settings"
        self._tuning = tuning
        self._own_store = own_store
        self._port = free_port()
        self._store: subprocess.Popen[bytes] | None = None
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, nodes: int) -> float:
        if self._own_store:
            self._start_store()
        moment = time.time()
        for index in range(nodes):
            self.add(index)
        return moment

    def add(self, index: int) -> float:
        moment = time.time()
        conf = dict(self._tuning.conf)
        if self._own_store:
            conf["is_host"] = "0"
        argv = [
            sys.executable, "-m", "torch.distributed.run",
            f"--nnodes={self.size.low}:{self.size.high}", "--nproc-per-node=1", "--max-restarts=100",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=bench",
            "--local-addr=127.0.0.1", *self._tuning.arguments,
            *([f"--rdzv-conf={','.join(f'{k}={v}' for k, v in conf.items())}"] if conf else []),
            *self._script,
        ]  # fmt: skip
        environ = {**os.environ, "LOGLEVEL": "INFO", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environ |= {"PYTHONUNBUFFERED": "1", **self._tuning.environ}
        self.nodes[index] = spawn(argv, environ, self.output, f"node {index}", str(self.folder))
        return moment

    def kill_node(self, index: int) -> float:
        node = self.nodes.pop(index)
        moment = time.time()
        kill_session(node.pid)
        node.wait()
        return moment

    def drain(self, index: int) -> float:
        moment = time.time()
        self.nodes[index].send_signal(signal.SIGTERM)
        return moment

    def kill_store(self) -> float:
        assert self._store is not None
        moment = kill(self._store.pid)
        self._store.wait()
        self._start_store()
        return moment

    def dead(self) -> bool:
        return bool(self.nodes) and all(node.poll() is not None for node in self.nodes.values())

    def marks(self, since: float) -> dict[str, float]:
        """See the base class. The times come from torchrun's log: the first node that detects, else the last node."""
        found: dict[str, list[float]] = {name: [] for name in _MARKS}
        for line in list(self.output.lines):
            if line.time >= since and (stamp := _STAMP.search(line.text)):
                for name, pattern in _MARKS.items():
                    if pattern.search(stamp[2]):
                        found[name].append(_unix(stamp[1], line.time))
        choose = {"detect": min, "stop": max, "rendezvous": max}
        return {name: choose[name](times) for name, times in found.items() if times}

    def close(self) -> None:
        for node in self.nodes.values():
            kill_session(node.pid)
            node.wait()
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def _start_store(self) -> None:
        self._store = torch_store(self._port, self.output, self.folder)


def torch_store(port: int, output: Output, folder: Path) -> subprocess.Popen[bytes]:
    """Start torch's TCPStore server as a process and wait until it serves."""
    before = len(output.lines)
    store = spawn([sys.executable, "-c", _STORE, str(port)], dict(os.environ), output, "store", str(folder))
    output.wait(lambda: any(line.text == "serving" for line in output.lines[before:]), 60)
    return store


def _unix(stamp: str, near: float) -> float:
    """Convert a time stamp of torch's log, which has no year, to Unix seconds. `near`: a time in the same year."""
    year = datetime.fromtimestamp(near).year
    return datetime.strptime(f"{year}{stamp}", "%Y%m%d %H:%M:%S.%f").timestamp()
