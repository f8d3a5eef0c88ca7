"""Part the network of a local run: the run has a network namespace of its own, in which packets are dropped."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from elasticjob._runtime.contract.names import Env
from support.common.processes import child_with, environ_of

OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "-"]
"""Replaces itself with the command in its arguments, in a network namespace of its own."""
_ESTABLISHED = "01"


def agent_of(index: int, run: int) -> int:
    """Return the process id of the agent of an index; `run` is the process id of the local run."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == run and environ_of(int(path.parent.name)).get(Env.INDEX) == str(index):
                return int(path.parent.name)
        except OSError:
            continue  # the process has ended
    raise AssertionError(f"no agent of index {index}")


def connections_of(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the local and the remote port of each established connection of a process."""
    inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in inodes:
                yield int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16)


class Partition:
    """Cuts nodes off from the store and from the other nodes; they reach each other."""

    def __init__(self, run: int, size: int) -> None:
        """`run` is the process id of a local run with `size` nodes in its first round."""
        self._agents = [agent_of(index, run) for index in range(size)]
        self._store_port = int(environ_of(child_with("store"))[Env.PORT])
        self._iptables = ["nsenter", f"--net=/proc/{run}/ns/net", "iptables"]

    def cut(self, *indices: int) -> None:
        """Cut off these nodes, node 0 among them, which hosts the store of the round."""
        clients, round_port = self._linked()
        print(f"cut off {indices} of {clients}; store {self._store_port}, round's store {round_port}")
        for index, connections in clients.items():
            away = self._store_port if index in indices else round_port
            for local, remote in connections:
                if remote == away and local != round_port:
                    self._drop("--sport", local, "--dport", remote)
                    self._drop("--sport", remote, "--dport", local)
        for port in (self._store_port, round_port):
            self._drop("--dport", port, "--syn")

    def _linked(self) -> tuple[dict[int, list[tuple[int, int]]], int]:
        """Wait until all nodes are linked to node 0; return the connections of each, and the port of node 0."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            clients = {index: list(connections_of(pid)) for index, pid in enumerate(self._agents)}
            hosted = {local for local, _ in clients[0]}.intersection(
                *({remote for _, remote in clients[index]} for index in clients if index)
            )
            if hosted:
                (round_port,) = hosted
                return clients, round_port
            time.sleep(0.05)
        raise AssertionError("not all nodes are linked to node 0")

    def heal(self) -> None:
        subprocess.run([*self._iptables, "-F", "INPUT"], check=True)

    def _drop(self, *match: object) -> None:
        subprocess.run([*self._iptables, "-A", "INPUT", "-p", "tcp", *map(str, match), "-j", "DROP"], check=True)
