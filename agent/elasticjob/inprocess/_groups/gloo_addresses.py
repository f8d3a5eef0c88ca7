"""The addresses of gloo's connections: each member of a group listens on one and publishes it in the group's store."""

from __future__ import annotations

import logging
import re
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any

from elasticjob._runtime.system.sockets.ip_addresses import plain_address
from elasticjob.inprocess._groups.own_sockets import Address

log = logging.getLogger(__name__)

_IPV4 = rb"\x02\x00(?!\x00\x00)(?P<port4>..)(?P<ipv4>....)\x00{8}"
"""`struct sockaddr_in` of Linux with a port, as gloo writes it."""
_IPV6 = rb"\x0a\x00(?!\x00\x00)(?P<port6>..)....(?P<ipv6>.{16})"
"""`struct sockaddr_in6`."""
_ADDRESS = re.compile(_IPV4 + b"|" + _IPV6, re.DOTALL)
"""The first one of both: the bytes of an address of IPv6 may look like an address of IPv4."""


def published_addresses(store: Any, devices: Iterable[str], own_rank: int, size: int) -> set[Address]:
    """Return the addresses that the members of a gloo group have written to its store; empty if they cannot be read.

    `devices`: the types that its backends serve. A backend that serves several types has written the addresses under
    one of them, and one that `split_group` has made under none.
    """
    found: set[Address] = set()
    try:
        for prefix in () if size == 1 else (*(f"{device}//0/" for device in sorted(devices)), "0/"):
            if store.check([f"{prefix}{own_rank}"]):
                values = store.multi_get([f"{prefix}{rank}" for rank in range(size)])
                found |= {address for value in values if (address := parse_address(bytes(value))) is not None}
    except (RuntimeError, ValueError) as error:
        log.warning("the connections of a gloo group are unknown, a wait for a silent peer cannot be ended: %s", error)
    return found


def read_in_time(groups: Iterable[tuple[Any, ...]], seconds: float) -> set[Address]:
    """Return what `published_addresses` returns for each of the groups, as far as their stores answer in time.

    A client of a store waits in C++ code until another thread's operation over the same connection has ended.
    """
    found: list[set[Address]] = []

    def read(arguments: tuple[Any, ...]) -> None:
        found.append(published_addresses(*arguments))

    threads = [threading.Thread(target=read, args=(group,), daemon=True, name="gloo-addresses") for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        seconds = seconds if not thread.is_alive() else 0.0
    if any(thread.is_alive() for thread in threads):
        log.warning("the connections of a gloo group are unknown: its store does not answer")
    return set().union(*found)


def parse_address(published: bytes) -> Address | None:
    """Return the first socket address in what a member of a gloo group publishes; None if there is none."""
    match = _ADDRESS.search(published)
    if match is None:
        return None
    if match["ipv4"] is not None:
        return socket.inet_ntop(socket.AF_INET, match["ipv4"]), struct.unpack("!H", match["port4"])[0]
    return plain_address(socket.inet_ntop(socket.AF_INET6, match["ipv6"])), struct.unpack("!H", match["port6"])[0]
