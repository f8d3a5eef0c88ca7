"""`RendezvousBackend`s for torch's own dynamic rendezvous: its one state, in our store or in a file.

Compatible with torch's c10d backend key by key, so that nodes with either may meet: the state is kept in base64 under
`torch.rendezvous.<run id>`, a sentinel stands for none (torch's stores wait for keys that do not exist), and what is
kept is its own fencing token.
"""

from __future__ import annotations

import binascii
import fcntl
import os
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import distributed as dist
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from elasticjob.contract.messages import RoundSettings
from elasticjob.torchrun.stores import HostedStore, host_store, parse_endpoint, parse_read_timeout, tcp_store

NULL_SENTINEL = b"Y2FuaW1hZGFt"
"""Torch's own. It is base64 as well, of a text that no state is."""


class Cell(Protocol):
    """One value that can be compared and set; OSError and what torch's stores raise when it cannot be reached."""

    def get(self) -> bytes: ...

    def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        """The value afterwards; a missing one is set where nothing is expected."""
        ...


class StoreCell:
    """A key of a TCPStore. `hosted`: its server, if it is a child of this process; it goes with the cell."""

    def __init__(self, store: Any, key: str, hosted: HostedStore | None = None) -> None:
        self._store = store
        self._key = key
        self._hosted = hosted

    def get(self) -> bytes:
        return bytes(self._store.get(self._key))

    def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._store.compare_set(self._key, expected.decode(), desired.decode()))


class FileCell:
    """A file of its own, locked while it is used. Torch's FileStore appends every heartbeat and never shrinks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self) -> bytes:
        return self._locked(lambda descriptor: _read(descriptor))

    def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        def exchange(descriptor: int) -> bytes:
            held = _read(descriptor)
            if held != expected:
                return held
            os.pwrite(descriptor, desired, 0)
            os.ftruncate(descriptor, len(desired))
            return desired

        return self._locked(exchange)

    def _locked(self, use: Callable[[int], bytes]) -> bytes:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            return use(descriptor)
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class ElasticJobRendezvousBackend(RendezvousBackend):  # type: ignore[misc]  # torch has no types here
    """The state of one rendezvous in one cell. See torch's base class for the contract."""

    def __init__(self, cell: Cell, name: str) -> None:
        """RendezvousConnectionError where the cell cannot be reached."""
        self._cell = cell
        self._name = name
        self._reach(lambda: cell.compare_set(b"", NULL_SENTINEL))

    @property
    def name(self) -> str:
        return self._name

    def get_state(self) -> tuple[bytes, Any] | None:
        return _decode(self._reach(self._cell.get))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if token and not isinstance(token, bytes):
            # It is none of ours: nothing can match it.
            found = self.get_state()
            return None if found is None else (*found, False)
        expected, desired = token or NULL_SENTINEL, b64encode(state)
        found = _decode(self._reach(lambda: self._cell.compare_set(expected, desired)))
        # The value does not tell who wrote it: states that are the same are as good as set.
        return None if found is None else (*found, found[0] == state)

    def _reach(self, operation: Callable[[], bytes]) -> bytes:
        try:
            return operation()
        except (OSError, ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(f"the {self._name} store cannot be reached: {error}") from error


def _decode(kept: bytes) -> tuple[bytes, bytes] | None:
    if kept == NULL_SENTINEL:
        return None
    try:
        return b64decode(kept, validate=True), kept
    except binascii.Error as error:
        raise RendezvousStateError(f"the rendezvous state is corrupt: {error}") from error


def create_backend(params: RendezvousParameters) -> tuple[ElasticJobRendezvousBackend, Any]:
    """The backend, and the store for the nodes' process groups. As torch's, with our store or file.

    `store_type` is tcp (default) or file; tcp takes is_host and read_timeout, and the endpoint is host[:port] of the
    store. With file the endpoint is a path, of a temporary file if empty; the groups' keys are in a file beside it.
    """
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    try:
        if not params.run_id:
            raise ValueError("The run id must be a non-empty string.")
        if store_type == "tcp":
            return _on_store(params)
        if store_type == "file":
            return _on_file(params)
        raise ValueError(f"Invalid store type {store_type!r} given. Write tcp or file.")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(run_id=params.run_id, message=message, node_state=NodeState.FAILED)
        raise


def _on_store(params: RendezvousParameters) -> tuple[ElasticJobRendezvousBackend, Any]:
    timeout = parse_read_timeout(params)
    host, port = parse_endpoint(params)
    hosted = host_store(params, host, port, RoundSettings(1, 1, 1))
    store = tcp_store(host, hosted.port if hosted else port, serve=False, timeout=timeout)
    cell = StoreCell(store, f"torch.rendezvous.{params.run_id}", hosted)
    return ElasticJobRendezvousBackend(cell, "tcp"), store


def _on_file(params: RendezvousParameters) -> tuple[ElasticJobRendezvousBackend, Any]:
    try:
        path = Path(params.endpoint) if params.endpoint else _temporary()
        backend = ElasticJobRendezvousBackend(FileCell(path), "file")
        return backend, dist.FileStore(f"{path}.keys", -1)
    except RuntimeError as error:
        raise RendezvousConnectionError(f"{params.endpoint} cannot be used: {error}") from error


def _temporary() -> Path:
    """Readable and writable by this user alone."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="elasticjob-")
    except OSError as error:
        raise RendezvousError(f"no temporary file for the rendezvous: {error}") from error
    os.close(descriptor)
    return Path(name)
