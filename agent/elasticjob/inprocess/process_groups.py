"""The process groups of this process: break their collectives, which end all waits in them, and leave them.

gloo: a wait for a peer that was stopped or cut off lasts for the group's whole time-out. `abort` does not end
that, a shutdown of the group's connections does. They are found by their addresses: gloo listens on one address for
each group and publishes it in the group's store. Other connections of the process are left alone.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)

Address = tuple[str, int]
"""(IP address, port)."""

_IPV4 = re.compile(rb"\x02\x00(?!\x00\x00)(..)(....)\x00{8}", re.DOTALL)
"""`struct sockaddr_in` of Linux with a port, as gloo writes it."""
_IPV6 = re.compile(rb"\x0a\x00(?!\x00\x00)(..)....(.{16})", re.DOTALL)
"""`struct sockaddr_in6`."""


class ProcessGroups:
    """The process groups that are created while `watch` is active."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        """Ids of the groups that are registered."""
        self._gloo: set[Address] = set()
        """Addresses on which the members of this process's gloo groups listen."""
        self._abortable: list[Any] = []
        """Backends whose `abort` ends their collectives: nccl."""
        self._aborts: list[threading.Thread] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Register every group that is created in this context, also subgroups and those of device meshes."""
        create = distributed_c10d._new_process_group_helper

        @functools.wraps(create)
        def create_and_register(*args: Any, **kwargs: Any) -> Any:
            created = create(*args, **kwargs)
            self._register()
            return created

        distributed_c10d._new_process_group_helper = create_and_register
        try:
            yield
        finally:
            distributed_c10d._new_process_group_helper = create

    def break_collectives(self) -> None:
        """Make all collectives in progress fail, and later ones of these groups. Call it from any thread."""
        gloo, self._gloo = self._gloo, set()
        # Also the connections to the round's store: a group that is being created waits there for its members.
        _shut_down_connections(gloo | _store_addresses())
        abortable, self._abortable = self._abortable, []
        for backend in abortable:
            thread = threading.Thread(target=_abort, args=(backend,), daemon=True, name="abort")
            thread.start()
            self._aborts.append(thread)

    def leave(self) -> None:
        """In the main thread: destroy all groups. An error of the device is raised: this process cannot go on.

        Their collectives are broken before: destroying a group waits for those of its peers.
        """
        self.break_collectives()
        for thread in self._aborts:
            thread.join()
        self._known, self._aborts = set(), []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if dist.is_initialized():
            with suppress(RuntimeError):  # a group that was aborted
                dist.destroy_process_group()
        # An interrupted `init_process_group` has counted its group: the next one would meet under another name.
        distributed_c10d._world.group_count = 0

    def _register(self) -> None:
        for group, (_, store) in list(distributed_c10d._world.pg_map.items()):
            if id(group) in self._known:
                continue
            self._known.add(id(group))
            for device in group._device_types:
                backend = group._get_backend(device)
                if backend.name() == "gloo":
                    self._gloo |= _published_addresses(store, device.type, group.rank(), group.size())
                elif hasattr(backend, "abort") and backend not in self._abortable:
                    self._abortable.append(backend)


def collect_garbage() -> None:
    """Free what the last call of the function left in cycles: the old process groups and models among it."""
    gc.collect()


def _published_addresses(store: Any, device: str, own_rank: int, size: int) -> set[Address]:
    """Return the addresses that the members of a gloo group have written to its store; empty if they cannot be read.

    A backend that serves several types of devices has written them for one of these.
    """
    try:
        if size == 1 or not store.check([f"{device}//0/{own_rank}"]):
            return set()
        values = store.multi_get([f"{device}//0/{rank}" for rank in range(size)])
    except (RuntimeError, ValueError) as error:
        log.warning("the connections of a gloo group are unknown, a wait for a silent peer cannot be ended: %s", error)
        return set()
    return {address for value in values if (address := parse_address(bytes(value))) is not None}


def parse_address(published: bytes) -> Address | None:
    """Return the first socket address in what a member of a gloo group publishes; None if there is none."""
    if match := _IPV4.search(published):
        return socket.inet_ntop(socket.AF_INET, match[2]), struct.unpack("!H", match[1])[0]
    if match := _IPV6.search(published):
        return _plain(socket.inet_ntop(socket.AF_INET6, match[2])), struct.unpack("!H", match[1])[0]
    return None


def _store_addresses() -> set[Address]:
    """Return the addresses of the store in the environment; empty if it has none, or if its host has no address."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM) if host else []
    except (OSError, ValueError):
        return set()
    return {_end(entry[4]) for entry in found}


def _shut_down_connections(addresses: set[Address]) -> None:
    """Shut down all connections of this process to or from one of the addresses."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a directory of numbers, not of files)
        with suppress(OSError):  # closed since, or no socket
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                _shut_down(int(name), addresses)


def _shut_down(descriptor: int, addresses: set[Address]) -> None:
    # The duplicate stays the same connection if another thread closes the descriptor meanwhile.
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ends = {_end(connection.getsockname()), _end(connection.getpeername())}
        if ends & addresses:
            connection.shutdown(socket.SHUT_RDWR)


def _end(address: tuple[Any, ...]) -> Address:
    return _plain(str(address[0])), int(address[1])


def _plain(host: str) -> str:
    """Return an IPv4 address that is written as IPv6 as what it is."""
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):
        backend.abort()
