"""Requests that a server executes for a client that is lost: when the last of its connections has closed. No I/O.

A client may have several connections, also from several processes, under one name. It is lost when all of them are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_SIZE = 1 << 14
"""Bytes of the requests of one client."""


@dataclass
class _Client:
    requests: bytes = b""
    """Encoded requests, one after another."""
    connections: set[object] = field(default_factory=set)


class LastRequests:
    """What the clients of one server have asked for."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}
        self._names: dict[object, bytes] = {}

    def set(self, connection: object, name: bytes, requests: bytes) -> None:
        """Add a connection to a client, and replace the client's requests.

        An empty text means that the client leaves on purpose and its connections may close. ValueError: too many bytes,
        or the connection belongs to another client.
        """
        if len(requests) > MAX_SIZE:
            raise ValueError(f"{len(requests)} bytes are more than {MAX_SIZE}")
        if self._names.get(connection, name) != name:
            raise ValueError("a connection belongs to one client")
        if not requests:
            for closed in self._clients.pop(name, _Client()).connections:
                self._names.pop(closed, None)
            return
        client = self._clients.setdefault(name, _Client())
        client.requests = requests
        client.connections.add(connection)
        self._names[connection] = name

    def closed(self, connection: object) -> bytes:
        """Note that a connection has closed; return the requests to execute."""
        name = self._names.pop(connection, None)
        if name is None:
            return b""
        client = self._clients[name]
        client.connections.discard(connection)
        if client.connections:
            return b""
        del self._clients[name]
        return client.requests
