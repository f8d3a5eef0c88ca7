"""The process groups of this process: break their collectives, which end all waits in them, and leave them.

gloo: a wait for a peer that was stopped or cut off lasts for the group's whole time-out. `abort` does not end
that, a shutdown of the group's connections does. They are found by their addresses: gloo listens on one address for
each group and publishes it in the group's store. Other connections of the process are left alone.

A group that is being created may wait for connections that a silent peer never opens, for five times its time-out.
`break_collectives` opens and closes these connections in place of the peer: then the creation fails.

gloo fails the operations that wait for a connection before it closes it, but not the one whose bytes it was just
sending or receiving (`Pair::signalException` of its TCP transport): that one waits for the group's time-out, and
nothing in this process can end it. `has_lost_operation` reports that.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticjob.inprocess.store_connection import interruptible_connections
from elasticjob.training.devices import synchronize_device
from elasticjob.training.sharded.device_mesh_caches import forget_device_meshes

log = logging.getLogger(__name__)

Address = tuple[str, int]
"""(IP address, port)."""

_CONNECT_TIMEOUT = 1.0
"""Seconds, for connections within this host."""

_END_TIMEOUT = 5.0
"""Seconds that the end of the process waits for threads of gloo. One that hangs does not end by waiting."""

_IPV4 = re.compile(rb"\x02\x00(?!\x00\x00)(..)(....)\x00{8}", re.DOTALL)
"""`struct sockaddr_in` of Linux with a port, as gloo writes it."""
_IPV6 = re.compile(rb"\x0a\x00(?!\x00\x00)(..)....(.{16})", re.DOTALL)
"""`struct sockaddr_in6`."""

_GLOO_WORKER = "pt_gloo_runloop"
"""Name of the threads in which torch runs collectives of gloo."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Number of the system call in which a thread waits for another one, by machine."""
_ASLEEP_SECONDS = 0.05
"""How long threads must not have run. One that waits for the interpreter's lock runs each 5 ms."""


@dataclass(frozen=True)
class _Creation:
    """A group that is being created."""

    size: int
    """Number of its members."""
    listening_before: frozenset[tuple[Any, ...]]
    """The addresses on which this process listened when the creation began."""


class ProcessGroups:
    """The process groups that are created while `watch` is active."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        """Ids of the groups that are registered."""
        self._gloo: set[Address] = set()
        """Addresses on which the members of this process's gloo groups listen."""
        self._older_workers: frozenset[str] = frozenset()
        """Threads of gloo of groups that were not created while `watch` is active."""
        self._abortable: list[Any] = []
        """Backends whose `abort` ends their collectives: nccl."""
        self._aborts: list[threading.Thread] = []
        self._creating: _Creation | None = None
        self._breaks = 0
        """How often `break_collectives` was called."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Register every group that is created in this context, also subgroups and those of device meshes."""
        create = distributed_c10d._new_process_group_helper

        @functools.wraps(create)
        def create_and_register(group_size: int, *args: Any, **kwargs: Any) -> Any:
            self._creating, breaks = _Creation(group_size, frozenset(_listening())), self._breaks
            # A new group may have the id of one that the function has destroyed.
            self._known &= {id(group) for group in distributed_c10d._world.pg_map}
            try:
                created = create(group_size, *args, **kwargs)
                self._register()
            finally:
                self._creating = None
            if self._breaks != breaks:  # the connections in place of the peers came in time: it was created with them
                self.break_collectives()
            return created

        self._older_workers = frozenset(_threads(_GLOO_WORKER))
        distributed_c10d._new_process_group_helper = create_and_register
        try:
            with interruptible_connections():
                yield
        finally:
            distributed_c10d._new_process_group_helper = create

    def break_collectives(self) -> None:
        """Make all collectives in progress fail, and later ones of these groups. Call it from any thread."""
        self._breaks += 1  # first: a group that is registered from now on sees it
        gloo, self._gloo = self._gloo, set()
        # Also the connections to the round's store: a group that is being created waits there for its members.
        _shut_down_connections(gloo | _store_addresses())
        if creating := self._creating:
            _connect_in_place_of_peers(creating)
        abortable, self._abortable = self._abortable, []
        for backend in abortable:
            thread = threading.Thread(target=_abort, args=(backend,), daemon=True, name="abort")
            thread.start()
            self._aborts.append(thread)

    def has_lost_operation(self) -> bool:
        """Return whether the main thread waits for an operation of gloo that only ends with its group's time-out: it
        sleeps, a thread of gloo sleeps until a deadline, and no connection is left from which that could hear.

        Call it after `break_collectives` and after a signal that ends all other waits of the main thread. Where it
        looks like that, it takes `_ASLEEP_SECONDS`, in which no signal may be sent.
        """
        before = self._sleepers()
        if not before or _epoll_watches_connection():
            return False
        time.sleep(_ASLEEP_SECONDS)
        return not before.isdisjoint(self._sleepers())

    def _sleepers(self) -> set[tuple[_Sleeper, _Sleeper]]:
        """Return each thread of gloo that waits until a deadline, with the main thread; none if that runs."""
        main = _sleeper(str(os.getpid()))
        workers = map(_sleeper, set(_threads(_GLOO_WORKER)) - self._older_workers)
        return {(main, worker) for worker in workers if main and worker and worker.has_deadline}

    def leave(self) -> None:
        """In the main thread: destroy all groups. An error of the device is raised: this process cannot go on.

        Their collectives are broken before: destroying a group waits for those of its peers. The threads of gloo, which
        wake up each 10 ms only, end while the next round forms: their connections are shut down.
        """
        if self._gloo or self._abortable:  # not broken yet
            self.break_collectives()
        for thread in self._aborts:
            thread.join()
        self._known, self._aborts = set(), []
        synchronize_device()
        gloo = [backend for group in distributed_c10d._world.pg_map for backend in _gloo_backends(group)]
        if dist.is_initialized():
            with suppress(RuntimeError):  # a group that was aborted
                dist.destroy_process_group()
        _end_in_background(gloo)
        # An interrupted `init_process_group` has counted its group: the next one would meet under another name.
        distributed_c10d._world.group_count = 0
        forget_device_meshes()

    def _register(self) -> None:
        for group, (_, store) in list(distributed_c10d._world.pg_map.items()):
            if id(group) in self._known:
                continue
            self._known.add(id(group))
            addresses: set[Address] = set()
            for device in sorted(group._device_types, key=lambda device: str(device.type)):
                backend = group._get_backend(device)
                if backend.name() == "gloo":  # one backend serves all types, and has written for the first
                    addresses = addresses or _published_addresses(store, device.type, group.rank(), group.size())
                elif hasattr(backend, "abort") and backend not in self._abortable:
                    self._abortable.append(backend)
            self._gloo |= addresses


_ending: list[threading.Thread] = []
"""Threads that end gloo backends."""


def _end_in_background(gloo: list[Any]) -> None:
    _ending[:] = filter(threading.Thread.is_alive, _ending)
    _ending.append(threading.Thread(target=gloo.clear, daemon=True, name="end-of-gloo"))
    _ending[-1].start()


@atexit.register
def _wait_for_ends() -> None:
    """Python stops the threads that are left when it ends, and one that is in C++ code then aborts the process."""
    for thread in _ending:
        thread.join(_END_TIMEOUT)


def _gloo_backends(group: Any) -> list[Any]:
    """Return the gloo backends of a group; none if it was aborted."""
    with suppress(RuntimeError):
        backends = [group._get_backend(device) for device in group._device_types]
        return [backend for backend in backends if backend.name() == "gloo"]
    return []


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
        # As bytes: Python imports its codec for international names otherwise, while all ranks wait.
        found = socket.getaddrinfo(host.encode(), int(port), type=socket.SOCK_STREAM) if host else []
    except (OSError, ValueError):
        return set()
    return {_end(entry[4]) for entry in found}


def _connect_in_place_of_peers(creation: _Creation) -> None:
    """Open and close a connection for each member to the address on which this process waits for them.

    A member sends the number of the pair that it connects, which gloo counts from 0 for each address. A number that
    gloo does not wait for has no effect. The connections of a group that has just been created end with it anyway.
    """
    for address in _listening() - creation.listening_before:
        for pair in range(creation.size):
            with suppress(OSError), socket.create_connection(address[:2], timeout=_CONNECT_TIMEOUT) as connection:
                connection.sendall(struct.pack("<q", pair))


def _listening() -> set[tuple[Any, ...]]:
    """Return the addresses on which this process listens, as sockets have them."""
    found = set()
    for _, sock in _ip_sockets():
        with suppress(OSError):
            if _listens(sock):
                found.add(sock.getsockname())
    return found


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down_connections(addresses: set[Address]) -> None:
    """Shut down all connections of this process to or from one of the addresses."""
    for connection in _connections(addresses):
        with suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_RDWR)


def _connections(addresses: set[Address]) -> Iterator[socket.socket]:
    """Yield all connections of this process to or from one of the addresses, each as a duplicate."""
    for _, found in _ip_sockets():
        with suppress(OSError):  # not connected
            if {_end(found.getsockname()), _end(found.getpeername())} & addresses:
                yield found


def _ip_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the IP sockets of this process, with their file descriptors. Each is a duplicate, and stays the same if
    another thread closes it."""
    for number, link in _open_files().items():
        with suppress(OSError):  # closed since
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        yield number, found


def _open_files() -> dict[int, str]:
    """Return the open files of this process as the links in /proc name them, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a directory of numbers, not of files)
        with suppress(OSError):  # closed since
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def _epoll_watches_connection() -> bool:
    """Return whether any thread of this process may wait for events of an IP connection, as gloo's do."""
    connections = {number for number, found in _ip_sockets() if not _listens(found)}
    watched = set()
    for number, link in _open_files().items():
        with suppress(OSError):  # closed since
            if link == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{number}").read_text()
                watched |= {int(found) for found in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)}
    return not watched.isdisjoint(connections)


def _threads(name: str) -> Iterator[str]:
    """Yield the ids of this process's threads of a name."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208  (a directory of numbers, not of files)
        with suppress(OSError):  # ended since
            if Path(f"/proc/self/task/{task}/comm").read_text().strip() == name:
                yield task


@dataclass(frozen=True)
class _Sleeper:
    """A thread that waits for another one. Two samples of it are equal if it has not run in between."""

    task: str
    call: tuple[str, ...]
    """The arguments of its system call; the fourth one is the address of the deadline."""
    switches: str
    """How often it has begun to wait for something."""

    @property
    def has_deadline(self) -> bool:
        return int(self.call[3], 16) != 0


def _sleeper(task: str) -> _Sleeper | None:
    """Return a thread that waits for another one; None if it does not, or if the kernel does not show it."""
    folder = Path("/proc/self/task", task)
    try:
        number, *arguments = (folder / "syscall").read_text().split()
        switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (folder / "status").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # ended since
        return None
    if number != _FUTEX.get(os.uname().machine) or switches is None:
        return None
    return _Sleeper(task, tuple(arguments), switches[1])


def _end(address: tuple[Any, ...]) -> Address:
    return _plain(str(address[0])), int(address[1])


def _plain(host: str) -> str:
    """Return an IPv4 address that is written as IPv6 as what it is."""
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):
        backend.abort()
