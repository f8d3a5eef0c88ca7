"""Where a process runs: the processors, memory policy and priority that `numactl`, `taskset` and `nice` set."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, by machine."""
_POLICY = re.compile(r"(default|prefer|bind|interleave|local)(?:=(static|relative))?(?::([\d,-]+))?$")
"""The policies that Linux writes to /proc/PID/numa_maps and that `ProcessPlacement.apply` can set, with their nodes."""
_MODES = {"default": 0, "prefer": 1, "bind": 2, "interleave": 3, "local": 4}
_FLAGS = {None: 0, "static": 1 << 15, "relative": 1 << 14}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessPlacement:
    """The processors, the memory policy and the priority of a process."""

    processors: frozenset[int] = frozenset()
    memory: str = "default"
    """As the kernel writes it, such as `bind:0-1`."""
    nice: int = 0

    def can_be_applied(self) -> bool:
        """Return whether a child of this process can take the placement."""
        own_nice = os.getpriority(os.PRIO_PROCESS, 0)
        is_known = _POLICY.match(self.memory) is not None and platform.machine() in _SET_MEMPOLICY
        return (is_known or self.memory == memory_policy("self")) and (self.nice >= own_nice or os.geteuid() == 0)

    def apply(self) -> None:
        """Give this process the placement; OSError where that fails. Safe between fork and exec."""
        os.sched_setaffinity(0, self.processors)
        os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        found = _POLICY.match(self.memory)
        if found is None or self.memory == memory_policy("self"):
            return
        nodes = parse_nodes(found[3] or "")
        mask = (ctypes.c_ulong * (max(nodes, default=0) // 64 + 1))()
        for node in nodes:
            mask[node // 64] |= 1 << node % 64
        size = len(mask) * 64 + 1 if nodes else 0  # the kernel reads one bit less
        mode = _MODES[found[1]] | _FLAGS[found[2]]
        if _libc.syscall(_SET_MEMPOLICY[platform.machine()], mode, mask if nodes else None, ctypes.c_ulong(size)) != 0:
            raise OSError(ctypes.get_errno(), f"set_mempolicy({self.memory})")


def read_placement(pid: int) -> ProcessPlacement:
    """Return the placement of a process; OSError if it has ended."""
    return ProcessPlacement(
        frozenset(os.sched_getaffinity(pid)), memory_policy(str(pid)), os.getpriority(os.PRIO_PROCESS, pid)
    )


def memory_policy(pid: str) -> str:
    """Return the policy of a process's first mapping, which is that of the process."""
    try:
        line = Path(f"/proc/{pid}/numa_maps").read_text(errors="replace").partition("\n")[0]
    except OSError:
        return "default"  # a kernel without NUMA
    return re.split(r" (?:file=|heap|stack|huge|anon=|mapped=)", line.partition(" ")[2], maxsplit=1)[0].strip()


def parse_nodes(text: str) -> list[int]:
    """Return the numbers of a list such as `0,2-3`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
