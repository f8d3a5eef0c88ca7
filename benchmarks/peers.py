"""Other libraries that continue training in the surviving processes. `make peers` installs them, each in its own venv.

Each side runs the training of `train_in_process.py`, written for that library as its documentation shows.
"""

from __future__ import annotations

import os
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ours import free_port
from benchmarks.output import Output, spawn
from benchmarks.side import Side, Size, kill

NVIDIA = "NVIDIA resiliency ext"
TORCHFT = "torchft"
VENVS = Path(__file__).parents[1] / ".cache" / "peers"
MARK = "ELASTICJOB_BENCH_NODE"
"""Environment variable of all processes of a node, those that leave its session included: FOLDER:INDEX:"""


class Peer(Side):
    """A job of another library: each node is a process, or a launcher with its worker."""

    def __init__(self, folder: Path, size: Size = Size()) -> None:  # noqa: B008
        super().__init__(folder, size)
        self.bin = VENVS / self.name / "bin"
        self.script = str(Path(__file__).with_name(f"train_{self.name}.py"))
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    @abstractmethod
    def command(self, index: int) -> tuple[list[str], Mapping[str, str]]:
        """Return the command of a node and the environment variables that it needs."""

    def start(self, nodes: int) -> float:
        moment = time.time()
        for index in range(nodes):
            self.add(index)
        return moment

    def add(self, index: int) -> float:
        moment = time.time()
        argv, environ = self.command(index)
        common = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", MARK: f"{self.folder}:{index}:"}
        full = {**os.environ, **common, **environ}
        self.nodes[index] = spawn(argv, full, self.output, f"node {index}", str(self.folder))
        return moment

    def kill_node(self, index: int) -> float:
        moment = time.time()
        for pid in marked(f"{self.folder}:{index}:"):
            kill(pid)
        self.nodes.pop(index).wait()
        return moment

    def drain(self, index: int) -> float:
        raise NotImplementedError(f"{self.name} has no rows that drain a node")

    def kill_store(self) -> float:
        raise NotImplementedError(f"{self.name} has no rows that kill the store")

    def dead(self) -> bool:
        return all(node.poll() is not None for node in self.nodes.values())

    def marks(self, since: float) -> dict[str, float]:
        """Return nothing: these libraries do not log the phases."""
        return {}

    def close(self) -> None:
        while found := marked(f"{self.folder}:"):
            for pid in found:
                kill(pid)
            time.sleep(0.02)
        for node in self.nodes.values():
            node.wait()


def marked(mark: str) -> list[int]:
    """Return the live processes whose mark begins so."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if any(entry.startswith(wanted) for entry in (path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
        except OSError:
            continue  # it ended, or it belongs to another user
    return found


class Nvidia(Peer):
    """NVIDIA's resiliency extension: `inprocess.Wrapper`. The first node hosts both stores."""

    name = "nvidia"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = free_port()

    def command(self, index: int) -> tuple[list[str], Mapping[str, str]]:
        rank = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(self.size.high)}
        # torch warns at each turn of the monitor thread, and rows wait until the training is silent.
        environ = {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return [str(self.bin / "python"), self.script, str(self.folder)], environ


class Torchft(Peer):
    """torchft: a lighthouse, and a replica group in each node, which torchrun starts again after its end."""

    name = "torchft"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = free_port()

    def start(self, nodes: int) -> float:
        argv = [
            str(self.bin / "torchft_lighthouse"), f"--bind=127.0.0.1:{self._port}", "--min_replicas=1",
            "--quorum_tick_ms=20", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=500",
        ]  # fmt: skip
        environ = {**os.environ, MARK: f"{self.folder}:lighthouse:"}
        log = Output()  # of its own: the lighthouse writes a line a tick, and rows wait until the training is silent
        self._lighthouse = spawn(argv, environ, log, "lighthouse", str(self.folder))
        return super().start(nodes)

    def command(self, index: int) -> tuple[list[str], Mapping[str, str]]:
        argv = [
            str(self.bin / "torchrun"), "--nnodes=1", "--nproc-per-node=1", f"--master-port={free_port()}",
            "--max-restarts=100", "--monitor-interval=0.1", self.script, str(self.folder),
        ]  # fmt: skip
        lighthouse = f"http://127.0.0.1:{self._port}"
        return argv, {"REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": "4", "TORCHFT_LIGHTHOUSE": lighthouse}

    def close(self) -> None:
        super().close()
        self._lighthouse.wait()


@dataclass(frozen=True)
class Library:
    """A library that can be a side. `distributions`: its name in package metadata, or names of which one is enough."""

    side: str
    make: Callable[[Path], Peer]
    folder: str
    distributions: tuple[str, ...]
    settings: str


LIBRARIES = (
    Library(
        NVIDIA,
        Nvidia,
        Nvidia.name,
        ("nvidia_resiliency_ext",),
        "`inprocess.Wrapper` with monitor thread 0.1 s, monitor process 0.02 s, heartbeats 0.1 s (timeout 1 s), soft "
        "and hard timeouts 1 s and 2 s, grace 0.5 s, last call 0.02 s, and a group timeout of 1 s. It aborts "
        "collectives of GPUs only: over gloo, a rank that waits for a live rank continues after the group's timeout. "
        "It replaces no process. The model and the optimizer stay in memory, where its documentation recommends a "
        "checkpoint",
    ),
    Library(
        TORCHFT,
        Torchft,
        Torchft.name,
        ("torchft_nightly", "torchft"),
        "one replica group a process, each under torchrun (monitor interval 0.1 s), lighthouse with a tick of 20 ms, a "
        "join timeout of 1 s and a heartbeat timeout of 0.5 s, heartbeats of 50 ms, and a group timeout of 1 s",
    ),
)


def installed(venvs: Path = VENVS) -> dict[str, Callable[[Path], Side]]:
    """Return the constructors of the sides that are installed."""
    return {library.side: library.make for library in LIBRARIES if version(library, venvs)}


def left_out(venvs: Path = VENVS) -> str:
    """Return one line about the sides that are not installed; empty if all are."""
    missing = [library.side for library in LIBRARIES if not version(library, venvs)]
    return f"without {' and '.join(missing)}, which `make peers` installs" if missing else ""


def note(venvs: Path = VENVS) -> str:
    """Return the version and the settings of each installed library, and what the value of its side is."""
    texts = [f"{lib.side} {found}: {lib.settings}." for lib in LIBRARIES if (found := version(lib, venvs))]
    value = (
        "Their value is the first step of any surviving rank in a new call of its function (NVIDIA) or with another "
        "number of ranks (torchft)."
    )
    return " ".join([*texts, value] if texts else [])


def version(library: Library, venvs: Path) -> str:
    """Return the version that the library's venv has; empty if there is none."""
    for name in library.distributions:
        for path in (venvs / library.folder).glob(f"lib/python*/site-packages/{name}-*.dist-info"):
            return path.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return ""
