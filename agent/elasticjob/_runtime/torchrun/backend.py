"""A `RendezvousBackend` for torch's own dynamic rendezvous. It keeps the state in our store or in a file.

Nodes with this backend and nodes with torch's c10d backend can share a rendezvous on one store, because both store the
same bytes: base64 of the state under the key `torch.rendezvous.<run id>`, or a sentinel before the first state is set
(a read from torch's store blocks until the key exists). The stored value is also the fencing token.

torchrun uses it with `--rdzv-backend=elasticjob --rdzv-conf=handler=dynamic`.
"""

from __future__ import annotations

import binascii
import fcntl
import json
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

from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import Backend, StoreClients
from elasticjob._runtime.torchrun.stores import HostedStore, host_store, parse_endpoint, parse_read_timeout, tcp_store

NULL_SENTINEL = b"Y2FuaW1hZGFt"
"""The value that stands for "no state", equal to torch's. It is base64 of a text that cannot be a state."""


class Cell(Protocol):
    """One stored value with an atomic compare-and-set.

    Both methods raise OSError, ValueError or RuntimeError when the storage is unreachable.
    """

    def get(self) -> bytes: ...

    def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` if the value equals `expected`, and return the value afterwards.

        A missing value equals b"".
        """
        ...


class StoreCell:
    """A key of a TCPStore. `hosted`: the server, if it is a child of this process; it ends when the cell is deleted."""

    def __init__(self, store: Any, key: str, hosted: HostedStore | None = None) -> None:
        self._store = store
        self._key = key
        self.hosted = hosted

    def get(self) -> bytes:
        return bytes(self._store.get(self._key))

    def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._store.compare_set(self._key, expected.decode(), desired.decode()))


class FileCell:
    """A key of a file: a JSON object, so that several runs can share the file. Locked during each operation.

    torch's FileStore would grow: it appends every heartbeat.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key = key

    def get(self) -> bytes:
        return self._locked(lambda descriptor: self._value(_read(descriptor)))

    def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        def exchange(descriptor: int) -> bytes:
            values = _read(descriptor)
            if self._value(values) == expected:
                values[self._key] = desired.decode()
                _write(descriptor, values)
            return self._value(values)

        return self._locked(exchange)

    def _value(self, values: dict[str, str]) -> bytes:
        return values.get(self._key, "").encode()

    def _locked(self, operation: Callable[[int], bytes]) -> bytes:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Not lockf: its locks belong to the process, so two threads would both hold one.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return operation(descriptor)
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> dict[str, str]:
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        values = json.loads(data or b"{}")
    except ValueError as error:
        raise RendezvousStateError(f"the rendezvous file is corrupt: {error}") from error
    if not (isinstance(values, dict) and all(isinstance(value, str) for value in values.values())):
        raise RendezvousStateError("the rendezvous file is corrupt: it is no JSON object of texts")
    return values


def _write(descriptor: int, values: dict[str, str]) -> None:
    data = json.dumps(values).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


class ElasticJobRendezvousBackend(RendezvousBackend):  # type: ignore[misc]  # torch has no types here
    """The state of one rendezvous in one cell. torch's base class documents the contract."""

    def __init__(self, cell: Cell) -> None:
        """Raise RendezvousConnectionError if the cell is unreachable."""
        self.cell = cell
        self._call(lambda: cell.compare_set(b"", NULL_SENTINEL))

    @property
    def name(self) -> str:
        """See the base class. torch's name: this is another implementation of the same backend."""
        return Backend.C10D.value

    def get_state(self) -> tuple[bytes, Any] | None:
        return _decode(self._call(self.cell.get))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if token and not isinstance(token, bytes):
            # The token comes from another backend, so no stored value can match it.
            current = self.get_state()
            return None if current is None else (*current, False)
        expected, desired = token or NULL_SENTINEL, b64encode(state)
        current = _decode(self._call(lambda: self.cell.compare_set(expected, desired)))
        # The value does not identify its writer, so an equal state counts as set by this call, as in torch's backend.
        return None if current is None else (*current, current[0] == state)

    def _call(self, operation: Callable[[], bytes]) -> bytes:
        try:
            return operation()
        except (OSError, ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(f"the rendezvous store is unreachable: {error}") from error


def _decode(value: bytes) -> tuple[bytes, bytes] | None:
    if value == NULL_SENTINEL:
        return None
    try:
        return b64decode(value, validate=True), value
    except binascii.Error as error:
        raise RendezvousStateError(f"the rendezvous state is corrupt: {error}") from error


def create_backend(params: RendezvousParameters) -> tuple[ElasticJobRendezvousBackend, Any]:
    """Return the backend and the store for the process groups, as torch's `create_backend` of c10d does.

    `store_type` tcp (default): the endpoint is host[:port] of our store; the options are is_host and read_timeout.
    `store_type` file: the endpoint is a path (empty: a temporary file); the process groups use the file `<path>.keys`.
    """
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    try:
        if not params.run_id:
            raise ValueError("The run id must be a non-empty string.")
        if store_type == "tcp":
            return _tcp_backend(params)
        if store_type == "file":
            return _file_backend(params)
        raise ValueError(f"Invalid store type {store_type!r} given. Write tcp or file.")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(run_id=params.run_id, message=message, node_state=NodeState.FAILED)
        raise


def _tcp_backend(params: RendezvousParameters) -> tuple[ElasticJobRendezvousBackend, Any]:
    timeout = parse_read_timeout(params)
    host, port = parse_endpoint(params)
    hosted = host_store(params, host, port, RoundSettings(1, 1, 1), StoreClients.ANY)
    store = tcp_store(host, hosted.port if hosted else port, serve=False, timeout=timeout)
    return ElasticJobRendezvousBackend(StoreCell(store, _key(params), hosted)), store


def _key(params: RendezvousParameters) -> str:
    return f"torch.rendezvous.{params.run_id}"


def _file_backend(params: RendezvousParameters) -> tuple[ElasticJobRendezvousBackend, Any]:
    try:
        path = Path(params.endpoint) if params.endpoint else _temporary_file()
        backend = ElasticJobRendezvousBackend(FileCell(path, _key(params)))
        return backend, dist.FileStore(f"{path}.keys", -1)
    except RuntimeError as error:
        raise RendezvousConnectionError(f"the rendezvous file {params.endpoint} is unusable: {error}") from error


def _temporary_file() -> Path:
    """Create an empty file, and the one for the process groups, for this user only; return the path of the first.

    torch would create the second one for all users to read, under a name that they can predict.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix="elasticjob-")
        os.close(os.open(f"{name}.keys", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise RendezvousError(f"cannot create a temporary file for the rendezvous: {error}") from error
    os.close(descriptor)
    return Path(name)
