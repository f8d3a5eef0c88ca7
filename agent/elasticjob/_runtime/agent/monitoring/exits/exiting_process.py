"""What an exiting process still holds (Linux).

The kernel closes the files of an exiting process after it has freed its memory. Until then its devices are in use, and
another process can neither listen on its ports nor take its locks. A new worker that starts earlier may fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elasticjob._runtime.agent.monitoring.exits.listening_ports import listening_ports
from elasticjob._runtime.agent.monitoring.exits.memory_headroom import memory_shortage
from elasticjob._runtime.agent.processes import open_files

_UNKNOWN = "its open files cannot be read"
_SHAREABLE_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|pts/.*|shm/.*)$")
# fmt: off
_LOCAL_FILE_SYSTEMS = frozenset((
    "autofs", "binfmt_misc", "bpf", "btrfs", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "devtmpfs", "ext2", "ext3", "ext4", "f2fs", "fusectl", "hugetlbfs", "mqueue", "nsfs",
    "overlay", "proc", "pstore", "ramfs", "securityfs", "selinuxfs", "squashfs", "sysfs", "tmpfs",
    "tracefs", "vfat", "xfs", "zfs",
))
# fmt: on
_LISTENS = "0A"
"""A state in /proc/net/tcp."""


def may_still_write(pid: int, root: Path = Path("/")) -> bool:
    """Return whether an exiting process has files open on a file system that other Nodes may have mounted too.

    Their data may reach the other Nodes only when the kernel closes the files.
    """
    try:
        shared = _shared_mounts(root / "proc/self/mountinfo")
    except OSError:
        return True
    if not shared:
        return False
    thread, files = _thread_with_files(root / "proc" / str(pid))
    return not files or any(_writes_to(thread / "fdinfo" / number, shared) for number in files)


def why_new_workers_must_wait(pid: int, root: Path = Path("/")) -> str:
    """Return why a new worker must wait for this exiting process; empty if it need not.

    The process may hold a device, a port, a lock, or memory that the new worker needs.
    """
    thread, files = _thread_with_files(root / "proc" / str(pid))
    if not files:
        return _UNKNOWN  # only root may read the files of an exiting process; or they are closed already
    try:
        reason = _device(files) or _lock(pid, thread, files, root / "proc/locks") or _fixed_port(files, root / "proc")
    except OSError as error:
        return f"what it holds is unknown: {error}"
    reason = reason or memory_shortage(root)
    return reason or ("" if files.keys() <= open_files(thread).keys() else _UNKNOWN)


def _shared_mounts(mountinfo: Path) -> frozenset[str]:
    """Return the ids of the mounted file systems that other Nodes may have mounted too."""
    mounts = [line.partition(" - ") for line in mountinfo.read_text(errors="replace").splitlines()]
    return frozenset(mount.split()[0] for mount, _, system in mounts if system.split()[0] not in _LOCAL_FILE_SYSTEMS)


def _thread_with_files(process: Path) -> tuple[Path, Mapping[str, str]]:
    """Return the folder of a thread that still has the process's files open, and these files by number.

    The threads of a process end one by one, and a thread that has ended shows no files.
    """
    with suppress(OSError):
        for thread in (process / "task").iterdir():
            if files := open_files(thread):
                return thread, files
    return process, {}


def _writes_to(info: Path, mounts: frozenset[str]) -> bool:
    try:
        fields = dict(line.split(maxsplit=1) for line in info.read_text().splitlines()[:3])
        return fields["mnt_id:"] in mounts and int(fields["flags:"], 8) & os.O_ACCMODE != os.O_RDONLY
    except (OSError, ValueError, KeyError):
        return True


def _device(files: Mapping[str, str]) -> str:
    devices = (path for path in files.values() if path.startswith("/dev/") and not _SHAREABLE_DEVICE.match(path))
    return next((f"it has {path} open" for path in devices), "")


def _lock(pid: int, thread: Path, files: Mapping[str, str], locks: Path) -> str:
    """Return a reason if the process has locked a file. `locks`: the file /proc/locks, which not every kernel has.

    /proc/locks lists all locks of the Node, but reading it takes 15 ms (an RCU grace period). So the locks are read
    from the process's own files.
    """
    if not locks.exists():
        return "its locks are unknown"
    numbers = (number for number, path in files.items() if path.startswith("/"))
    lines = (line.split() for number in numbers for line in (thread / "fdinfo" / number).read_text().splitlines())
    return "it has a file locked" if any(line[0] == "lock:" and line[5] == str(pid) for line in lines if line) else ""


def _fixed_port(files: Mapping[str, str], proc: Path) -> str:
    """Return a reason if the process listens on a fixed port: one that the kernel does not hand out by itself."""
    own = {int(path[8:-1]) for path in files.values() if path.startswith("socket:[")}
    low, high = (int(word) for word in (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
    try:
        ports = listening_ports()
    except OSError:
        ports = _ports_in_tables(proc / "net")
    fixed = (port for inode, port in ports.items() if inode in own and not low <= port <= high)
    return next((f"it listens on port {port}" for port in fixed), "")


def _ports_in_tables(folder: Path) -> dict[int, int]:
    """Return the same as `listening_ports`, for kernels without that service."""
    found = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # without IPv6
            for line in (folder / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS:
                    found[int(fields[9])] = int(fields[1].rpartition(":")[2], 16)
    return found
