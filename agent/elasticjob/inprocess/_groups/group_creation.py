"""A group that is being created: end what its creation waits for, by the sockets of this process."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elasticjob.inprocess._groups.own_sockets import Address, listening, socket_address

_CONNECT_TIMEOUT = 1.0
"""Seconds, for connections within this host."""


@dataclass(frozen=True)
class GroupCreation:
    """A group that is being created."""

    size: int
    """Number of its members."""
    listening_before: frozenset[tuple[Any, ...]]
    """The addresses on which this process listened when the creation began."""
    links_before: frozenset[str]
    """The sockets of this process when the creation of the group, or that of its next backend, began. Not read, which
    takes a third of a millisecond, while all that follows is of gloo."""
    gloo_follows: bool
    """Whether a backend of gloo may be created yet, whose sockets are left alone."""
    others_follow: bool
    """Whether the group has backends other than gloo."""


def connect_in_place_of_peers(creation: GroupCreation) -> None:
    """Open and close a connection for each member to the address on which this process waits for them.

    A member sends the number of the pair that it connects, which gloo counts from 0 for each address. A number that
    gloo does not wait for has no effect. The connections of a group that has just been created end with it anyway.
    """
    for address in listening() - creation.listening_before:
        for pair in range(creation.size):
            with suppress(OSError), socket.socket(_family(address), socket.SOCK_STREAM) as connection:
                connection.settimeout(_CONNECT_TIMEOUT)
                connection.connect(address)
                connection.sendall(struct.pack("<q", pair))


def _family(address: tuple[Any, ...]) -> socket.AddressFamily:
    """Return the family of a socket's address. That of IPv6 has four parts."""
    return socket.AF_INET6 if len(address) == len(("host", "port", "flow", "scope")) else socket.AF_INET


def store_addresses() -> set[Address]:
    """Return the addresses of the store in the environment; empty if it has none, or if its host has no address."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    try:
        # As bytes: Python imports its codec for international names otherwise, while all ranks wait.
        found = socket.getaddrinfo(host.encode(), int(port), type=socket.SOCK_STREAM) if host else []
    except (OSError, ValueError):
        return set()
    return {socket_address(entry[4]) for entry in found}
