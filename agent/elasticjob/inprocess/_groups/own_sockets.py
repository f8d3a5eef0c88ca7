"""The IP sockets of this process, also those of libraries in C++, found by /proc. Only the standard library."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from elasticjob._runtime.system.sockets.ip_addresses import plain_address

Address = tuple[str, int]
"""(IP address, port)."""


def ip_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the IP sockets of this process, with their file descriptors. Each is a duplicate, and stays the same if
    another thread closes it."""
    for number, link in own_open_files().items():
        with suppress(OSError):  # closed since
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        yield number, found


def own_open_files() -> dict[int, str]:
    """Return the open files of this process as the links in /proc name them, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a directory of numbers, not of files)
        with suppress(OSError):  # closed since
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def links() -> frozenset[str]:
    """Return the names that /proc gives the sockets of this process. No two sockets ever have the same one."""
    return frozenset(link for link in own_open_files().values() if link.startswith("socket:"))


def listening() -> set[tuple[Any, ...]]:
    """Return the addresses on which this process listens, as sockets have them."""
    found = set()
    for _, sock in ip_sockets():
        with suppress(OSError):
            if listens(sock):
                found.add(sock.getsockname())
    return found


def listens(sock: socket.socket) -> bool:
    """Return whether a socket accepts connections."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def connections(addresses: set[Address]) -> Iterator[socket.socket]:
    """Yield all connections of this process to or from one of the addresses, each as a duplicate."""
    for _, found in ip_sockets():
        with suppress(OSError):  # not connected
            if {socket_address(found.getsockname()), socket_address(found.getpeername())} & addresses:
                yield found


def shut_down_connections(addresses: set[Address]) -> None:
    """Shut down all connections of this process to or from one of the addresses."""
    for connection in connections(addresses):
        with suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_RDWR)


def shut_down_newer_than(before: frozenset[str], keep: set[Address]) -> int:
    """Shut down all IP sockets that are not among these `links`, also those that listen; return their number.

    Who waits in `accept` or `recv` on one gets an error. Sockets that have an address of `keep` are left alone.
    """
    done = 0
    for number, found in ip_sockets():
        with suppress(OSError):  # not connected, or closed since
            if os.readlink(f"/proc/self/fd/{number}") not in before and socket_address(found.getsockname()) not in keep:  # noqa: PTH115
                found.shutdown(socket.SHUT_RDWR)
                done += 1
    return done


def socket_address(address: tuple[Any, ...]) -> Address:
    """Return the address of a socket; an IPv4 address has one form on sockets of both families."""
    return plain_address(str(address[0])), int(address[1])
