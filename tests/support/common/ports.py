"""Ports for servers that a test starts later, in another process."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

LOWEST = 10_000


def free_port(following: int = 0) -> int:
    """Return a port that is free on all addresses of this machine, as are so many that follow it.

    It lies below those that the kernel gives to connections: one of these may take a port before the test's server.
    """
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(LOWEST, highest - following)
        with ExitStack() as stack:
            try:
                for number in range(port, port + following + 1):
                    stack.enter_context(socket.socket()).bind(("", number))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Return so many different ports as `free_port` returns one."""
    first = free_port(following=count - 1)
    return list(range(first, first + count))
