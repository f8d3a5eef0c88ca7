"""Where the processes of a job run: on the loopback address, or each node in a network namespace of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.output import Output, spawn

NODES = 5
"""Network namespaces that are made."""


@dataclass(frozen=True)
class Network:
    """The addresses of a job. `within`: by index, a command that runs another one on that node; empty: everywhere."""

    store: str = "127.0.0.1"
    nodes: Sequence[str] = ()
    """Address of each index; empty: that of the store."""
    within: Sequence[Sequence[str]] = ()
    interface: str = "lo"
    """The nodes' network interface."""

    def address(self, index: int) -> str:
        return self.nodes[index] if self.nodes else self.store

    def command(self, index: int) -> list[str]:
        """Return the first words of a command that runs on the node of an index."""
        return list(self.within[index]) if self.within else []


LOOPBACK = Network()


@contextmanager
def own_addresses(folder: Path) -> Iterator[Network]:
    """Yield a network of NODES nodes with addresses of their own, which a bridge joins. The store is at the bridge.

    It changes the network of this process, which must have a network namespace of its own (`unshare --net`), as root.
    """
    for command in ("link set lo up", "link add br0 type bridge", "addr add 10.9.0.1/24 dev br0", "link set br0 up"):
        _ip(command)
    addresses = [f"10.9.0.{10 + index}" for index in range(NODES)]
    with ExitStack() as stack:
        within = [stack.enter_context(_node(f"v{index}", addresses[index], folder)) for index in range(NODES)]
        yield Network("10.9.0.1", addresses, within, "eth0")


@contextmanager
def _node(link: str, address: str, folder: Path) -> Iterator[list[str]]:
    """Make a node with this address on the bridge; yield the command that runs another one there."""
    output = Output()
    held = spawn(["unshare", "--net", "sh", "-c", "echo made; exec sleep infinity"], {}, output, link, str(folder))
    try:
        if not output.wait(lambda: bool(output.lines), 10):
            raise RuntimeError("no network namespace was made")
        within = ["nsenter", f"--net=/proc/{held.pid}/ns/net"]
        _ip(f"link add {link} type veth peer name eth0 netns {held.pid}")
        _ip(f"link set {link} master br0 up")
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _ip(command, within)
        yield within
    finally:
        held.kill()
        held.wait()


def _ip(command: str, within: Sequence[str] = ()) -> None:
    subprocess.run([*within, "ip", *command.split()], check=True)
