"""When new workers wait for the end of a process that exits: what it holds, and how much memory is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest

from elasticjob._runtime.agent.monitoring.exits import exiting_process
from elasticjob._runtime.agent.monitoring.exits.exiting_process import may_still_write, why_new_workers_must_wait
from elasticjob._runtime.agent.monitoring.exits.listening_ports import listening_ports

GIB = 1 << 30
PID = 4711
PORTS = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


class Node:
    """A node's /proc, /sys and /dev, on which nothing is short and process PID holds nothing."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        (root / "proc/net").mkdir(parents=True)
        self.write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
        self.write("proc/net/tcp", PORTS)
        self.write("proc/locks", "")
        self.memory(available=20)
        self.opens(0, "/dev/null")
        self.opens(1, "pipe:[100]")
        self.opens(3, "/data/shard-7", os.O_RDONLY)
        self.opens(4, "/memfd:elasticjob-0 (deleted)")
        self.opens(5, "/data/events")
        self.opens(6, "/dev/shm/torch_1")
        self.free_shared_memory = 80
        monkeypatch.setattr(os, "statvfs", self.shared_memory)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def memory(self, *, available: int, programs: int = 4, huge_pages: int = 0) -> None:
        """The machine's memory in GiB."""
        lines = {"MemAvailable": available << 20, "AnonPages": programs << 20, "Shmem": 0}
        pages = f"HugePages_Total:    {huge_pages}\nHugePages_Free:     0\n"
        self.write("proc/meminfo", "".join(f"{name}:  {size} kB\n" for name, size in lines.items()) + pages)

    def shared_memory(self, _: Path) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=100, f_bfree=self.free_shared_memory, f_bavail=self.free_shared_memory)

    def opens(self, number: int, path: str, flags: int = os.O_RDWR, mount: int = 1, locked_by: int = 0) -> None:
        thread = self.root / f"proc/{PID}/task/{PID + 1}"  # the first thread of the process has ended before
        (self.root / f"proc/{PID}/task/{PID}/fd").mkdir(parents=True, exist_ok=True)
        (thread / "fd").mkdir(parents=True, exist_ok=True)
        (thread / "fd" / str(number)).symlink_to(path)
        info = f"pos:\t0\nflags:\t0{flags | os.O_CLOEXEC:o}\nmnt_id:\t{mount}\nino:\t8\n"
        if locked_by:
            info += f"lock:\t1: FLOCK  ADVISORY  WRITE {locked_by} 00:2d:8 0 EOF\n"
        self.write(f"proc/{PID}/task/{PID + 1}/fdinfo/{number}", info)

    def mounts(self, *systems: str) -> None:
        """The mounted file systems, with numbers from 1."""
        lines = (f"{i} 0 8:1 / /mnt{i} rw,relatime shared:1 - {name} x rw\n" for i, name in enumerate(systems, 1))
        self.write("proc/self/mountinfo", "".join(lines))

    def listens(self, port: int, inode: int = 500, state: str = "0A") -> None:
        self.opens(7, f"socket:[{inode}]")
        line = f"   0: 00000000:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  0  0 500 1\n"
        self.write("proc/net/tcp6", PORTS + line)

    def version_2(self, limit: str, used: int, programs: int, cache: int = 0) -> None:
        """The container's memory in GiB, by cgroup v2."""
        self.write("sys/fs/cgroup/memory.max", f"{limit}\n")
        self.write("sys/fs/cgroup/memory.current", f"{used * GIB}\n")
        stat = f"anon {programs * GIB}\nfile {cache * GIB}\nshmem 0\ninactive_file {cache * GIB}\n"
        self.write("sys/fs/cgroup/memory.stat", stat)

    def version_1(self, limit: int, used: int, programs: int) -> None:
        self.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{limit}\n")
        self.write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{used * GIB}\n")
        stat = f"rss 0\ntotal_rss {programs * GIB}\ntotal_shmem 0\ntotal_inactive_file 0\n"
        self.write("sys/fs/cgroup/memory/memory.stat", stat)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(exiting_process, "listening_ports", no_service)
    return Node(tmp_path, monkeypatch)


def no_service() -> dict[int, int]:
    raise OSError("this node is not the one that the test runs on")


def use_shared_memory(node: Node) -> None:
    node.free_shared_memory = 40


def use_memory_in_other_containers(node: Node) -> None:
    node.memory(available=5, programs=90)
    node.version_2("max", 4, 4)


CASES: dict[str, tuple[Callable[[Node], object], str]] = {
    "nothing": (lambda node: None, ""),
    "a GPU": (lambda node: node.opens(9, "/dev/nvidia0"), "it has /dev/nvidia0 open"),
    "an unknown device": (lambda node: node.opens(9, "/dev/accel/accel0"), "it has /dev/accel/accel0 open"),
    "a lock": (lambda node: node.opens(7, "/data/index", locked_by=PID), "it has a file locked"),
    "a lock of another process": (lambda node: node.opens(7, "/data/index", locked_by=99), ""),
    "a kernel that shows no locks": (lambda node: (node.root / "proc/locks").unlink(), "its locks are unknown"),
    "a fixed port": (lambda node: node.listens(8000), "it listens on port 8000"),
    "a port that the kernel chose": (lambda node: node.listens(40000), ""),
    "another process's port": (lambda node: node.listens(8000, inode=501), ""),
    "a connection to a fixed port": (lambda node: node.listens(8000, state="01"), ""),
    "a node with no room": (lambda node: node.memory(available=3), "the node has 3.0 GiB of memory left"),
    "huge pages": (lambda node: node.memory(available=20, huge_pages=8), "huge pages are in use"),
    "shared memory": (use_shared_memory, "more than half of /dev/shm is in use"),
    "a container with room": (lambda node: node.version_2(str(9 * GIB), 4, 4), ""),
    "a container without room": (
        lambda node: node.version_2(str(7 * GIB), 4, 4),
        "may exceed the container's limit (7.0 GiB)",
    ),
    "a container whose room is page cache": (lambda node: node.version_2(str(9 * GIB), 8, 4, cache=4), ""),
    "a container without a limit": (lambda node: node.version_2("max", 4, 4), ""),
    "other containers' memory": (use_memory_in_other_containers, ""),
    "cgroup v1 with room": (lambda node: node.version_1(9 * GIB, 4, 4), ""),
    "cgroup v1 without room": (lambda node: node.version_1(7 * GIB, 4, 4), "may exceed the container's limit"),
    "cgroup v1 without a limit": (lambda node: node.version_1((1 << 63) - 4096, 4, 4), ""),
    "unknown memory": (lambda node: node.write("proc/meminfo", ""), "the memory that is left is unknown"),
}


@pytest.mark.parametrize("case", CASES)
def test_new_workers_wait_for_what_they_may_need(node: Node, case: str) -> None:
    change, reason = CASES[case]
    change(node)
    found = why_new_workers_must_wait(PID, node.root)
    assert reason in found
    assert bool(found) == bool(reason)


def forget_files(node: Node) -> None:
    for file in (node.root / f"proc/{PID}/task/{PID + 1}/fd").iterdir():
        file.unlink()


def test_new_workers_wait_if_nothing_is_known_of_the_files(node: Node) -> None:
    forget_files(node)
    assert why_new_workers_must_wait(PID, node.root) == "its open files cannot be read"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ports_of_this_node(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    with listener, socket.socket(family) as silent:
        silent.bind((host, 0))
        ports = listening_ports()
        assert ports[os.fstat(listener.fileno()).st_ino] == listener.getsockname()[1]
        assert os.fstat(silent.fileno()).st_ino not in ports


def test_a_process_of_this_node_that_holds_nothing_special_can_be_read() -> None:
    assert why_new_workers_must_wait(os.getpid()) != "its open files cannot be read"


@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_a_lock_of_a_process_of_this_node(tmp_path: Path, lock: str) -> None:
    program = f"import fcntl; file = open('index', 'w'); fcntl.{lock}(file, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert why_new_workers_must_wait(process.pid) == "it has a file locked"
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("systems", "flags", "known", "writes"),
    [
        (["overlay", "proc", "ext4"], os.O_RDWR, True, False),
        (["overlay", "proc", "ext4"], os.O_RDWR, False, False),
        (["overlay", "proc", "nfs4"], os.O_RDWR, True, True),
        (["overlay", "proc", "fuse.unknown"], os.O_WRONLY, True, True),
        (["overlay", "proc", "nfs4"], os.O_RDONLY, True, False),
        (["overlay", "proc", "nfs4"], os.O_RDONLY, False, True),
    ],
)
def test_data_may_follow_into_files_that_other_machines_share(
    node: Node, systems: list[str], flags: int, known: bool, writes: bool
) -> None:
    node.mounts(*systems)
    node.opens(9, "/data/checkpoint", flags, mount=3)
    if not known:
        forget_files(node)
    assert may_still_write(PID, node.root) == writes


def test_data_may_follow_where_the_mounts_are_unknown(node: Node) -> None:
    assert may_still_write(PID, node.root)
