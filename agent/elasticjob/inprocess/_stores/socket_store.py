"""A client of a TCPStore server, torch's or ours, of the standard library only.

Monitor processes use it, because they must start fast and be small, and ranks, because an exception that is raised
from outside ends its waits at once. torch's client waits in C++, where none arrives.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from elasticjob._runtime.store import wire
from elasticjob._runtime.store.wire import Op
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive
from elasticjob.inprocess._stores.store_mixin import StoreMixin

_PREFIX = "/"
"""torch's clients put this before every key."""
_ANSWER_TIMEOUT = 60.0
"""Seconds that the server has to answer."""
_RETRY_INTERVAL = 0.05
_RECONNECT_TIMEOUT = timedelta(seconds=5)
"""A server that has run before accepts connections at once, or has ended."""


class Connection:
    """One connection. Requests of several threads are sent one after another."""

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        self.address = (host, port)
        self._lock = threading.RLock()
        self._socket = _connected(host, port, timeout)
        self._socket.sendall(wire.request(Op.VALIDATE, number=wire.MAGIC))

    @property
    def own_address(self) -> str:
        """IP address from which this process reaches the server."""
        return str(self._socket.getsockname()[0])

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this host."""
        return bool(self.own_address == self._socket.getpeername()[0])

    def close(self) -> None:
        self._socket.close()

    def exchange(self, request: bytes, size: int) -> bytes:
        """Send a request; return an answer of `size` bytes, or, if `size` is 0, one that begins with its length."""
        with self._lock:
            try:
                self._socket.sendall(request)
                return self._receive(size or int.from_bytes(self._receive(8), sys.byteorder))
            except BaseException:  # client and server no longer agree on what the next bytes are
                self._socket.close()
                raise

    def send(self, request: bytes) -> None:
        with self._lock:
            self._socket.sendall(request)

    def wait(self, request: bytes, timeout: float) -> bool:
        """Send a request that the server answers when a condition holds; return whether it did in time."""
        with self._lock:
            try:
                self._socket.sendall(request)
                try:
                    self._socket.settimeout(max(timeout, 1e-3))
                    self._receive(1)
                    return True
                except TimeoutError:
                    self._socket.settimeout(_ANSWER_TIMEOUT)
                self._socket.sendall(wire.request(Op.CANCEL_WAIT))
                if self._receive(1) == b"\0":  # the answer crossed CANCEL_WAIT, whose own answer follows
                    self._receive(1)
                    return True
                return False
            except BaseException:
                self._socket.close()
                raise
            finally:
                if self._socket.fileno() >= 0:
                    self._socket.settimeout(_ANSWER_TIMEOUT)

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            data = self._socket.recv(size - len(received))
            if not data:
                raise ConnectionResetError(f"the store at {endpoint_text(*self.address)} has closed the connection")
            received += data
        return bytes(received)


class SocketStore(StoreMixin):
    """The operations of `torch.distributed.TCPStore` that the wrapper needs.

    Every operation raises OSError once the server is unavailable. An operation that is interrupted by an exception
    closes the connection.
    """

    def __init__(self, connection: Connection, prefix: str = "") -> None:
        self.connection = connection
        self._prefix = prefix

    @classmethod
    def open(cls, host: str, port: int, timeout: timedelta) -> SocketStore:
        """Connect within `timeout`; ConnectionError: the server is unavailable."""
        return cls(Connection(host, port, timeout))

    def with_prefix(self, prefix: str) -> SocketStore:
        return SocketStore(self.connection, f"{self._prefix}{prefix}/")

    def connect(self) -> SocketStore:
        return SocketStore(Connection(*self.connection.address, _RECONNECT_TIMEOUT), self._prefix)

    def endpoint(self) -> tuple[str, int]:
        return self.connection.address

    def close(self) -> None:
        self.connection.close()

    def set(self, key: str, value: str | bytes) -> None:
        self.connection.send(wire.request(Op.SET, [self._key(key)], [_bytes(value)]))

    def append(self, key: str, value: str | bytes) -> None:
        self.connection.send(wire.request(Op.APPEND, [self._key(key)], [_bytes(value)]))

    def get(self, key: str) -> bytes:
        """Return the value of a key, as soon as it exists. TimeoutError: it does not after 60 s."""
        self.wait([key], timedelta(seconds=_ANSWER_TIMEOUT))
        return self.connection.exchange(wire.request(Op.GET, [self._key(key)]), 0)

    def add(self, key: str, number: int) -> int:
        answer = self.connection.exchange(wire.request(Op.ADD, [self._key(key)], number=number), 8)
        return int.from_bytes(answer, sys.byteorder, signed=True)

    def check(self, keys: Sequence[str]) -> bool:
        return self.connection.exchange(wire.request(Op.CHECK, [*map(self._key, keys)]), 1) == b"\0"

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = [_bytes(expected), _bytes(desired)]
        return self.connection.exchange(wire.request(Op.COMPARE_SET, [self._key(key)], values), 0)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist. TimeoutError: they do not after `timeout`."""
        request = wire.request(Op.WAIT, [*map(self._key, keys)])
        if not self.connection.wait(request, timeout.total_seconds()):
            raise TimeoutError(f"keys {', '.join(keys)} did not all exist within {timeout.total_seconds():g} s")

    def when_lost(self, name: str, requests: Sequence[bytes]) -> None:
        """Let our server execute requests when all connections under this name have closed; none: they may close."""
        self.connection.send(wire.request(Op.WHEN_LOST, [self._key(name)], [b"".join(requests)]))

    def request(self, op: Op, key: str, *values: str) -> bytes:
        """Return a request that concerns a key of this store."""
        return wire.request(op, [self._key(key)], [*map(_bytes, values)])

    def _key(self, key: str) -> bytes:
        return f"{_PREFIX}{self._prefix}{key}".encode()


def _connected(host: str, port: int, timeout: timedelta) -> socket.socket:
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_ANSWER_TIMEOUT)
        except OSError as error:  # not started yet, or its name is not resolved yet
            if time.monotonic() > deadline:
                raise ConnectionError(f"the store at {endpoint_text(host, port)} is unavailable: {error}") from error
            time.sleep(_RETRY_INTERVAL)
        else:
            KeepAlive(interval=15, max_attempts=4).apply(connection)
            return connection


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
