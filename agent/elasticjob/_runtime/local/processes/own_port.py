"""A port of this machine that stays the store's while the store is down."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10_000
ATTEMPTS = 100
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the kernel gives to connections, as two numbers."""


def listen_below_connections(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens on a free port which the kernel gives to no connection, where there is one.

    Else the port of a store that has ended could become the near end of a connection, of an agent that looks for this
    store even, and the store could not start again.
    """
    try:
        highest = int(PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        highest = LOWEST
    for _ in range(ATTEMPTS if highest > LOWEST else 0):
        try:
            return socket.create_server((address, random.randrange(LOWEST, highest)), backlog=backlog)  # noqa: S311
        except OSError:
            continue
    return socket.create_server((address, 0), backlog=backlog)
