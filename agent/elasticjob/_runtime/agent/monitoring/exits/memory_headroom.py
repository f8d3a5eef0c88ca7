"""Is there memory to start new workers before the memory of the old ones is freed? (Linux)

The agent no longer knows what the old worker used. It assumes the worst: all that programs of the container use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 62
"""Bytes. cgroup v1 has a number near 2 ** 63 where there is no limit."""


@dataclass(frozen=True)
class _ControlGroup:
    """Where a container sees its own control group in one version of cgroups, and the names in its `memory.stat`."""

    folder: str
    limit: str
    used: str
    programs: tuple[str, str]
    """Memory of programs, memory that they share."""
    reclaimable: str


_VERSIONS = (
    _ControlGroup("sys/fs/cgroup", "memory.max", "memory.current", ("anon", "shmem"), "inactive_file"),
    _ControlGroup(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_rss", "total_shmem"),
        "total_inactive_file",
    ),
)


def memory_shortage(root: Path = Path("/")) -> str:
    """Return why the memory that is left may be less than what the programs here use; empty if it is enough."""
    try:
        node = {name: 1024 * value for name, value in _lines(root / "proc/meminfo").items()}
        if node["HugePages_Total:"] > node["HugePages_Free:"]:
            return "huge pages are in use"
        used = node["AnonPages:"] + node["Shmem:"]
        for version in _VERSIONS:
            folder = root / version.folder
            if not (folder / version.limit).exists():
                continue
            kinds = _lines(folder / "memory.stat")
            here = sum(kinds[name] for name in version.programs)
            limit = (folder / version.limit).read_text().strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                working_set = int((folder / version.used).read_text()) - kinds[version.reclaimable]
                if int(limit) - working_set < here:
                    return f"its memory and that of a new worker may exceed the container's limit ({_size(int(limit))})"
            used = min(used, here)
        if node["MemAvailable:"] < used:
            return f"the node has {_size(node['MemAvailable:'])} of memory left"
        shared = os.statvfs(root / "dev/shm")
        if shared.f_bavail < shared.f_blocks - shared.f_bfree:
            return "more than half of /dev/shm is in use"
    except (OSError, ValueError, KeyError) as error:
        return f"the memory that is left is unknown: {error!r}"
    return ""


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this container in bytes; 0 if it has none, None if it is unknown."""
    for version in _VERSIONS:
        try:
            limit = (root / version.folder / version.limit).read_text().strip()
        except OSError:
            continue
        return int(limit) if limit.isdigit() and int(limit) < _UNLIMITED else 0
    return None


def _lines(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines begin with a name and a number."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
