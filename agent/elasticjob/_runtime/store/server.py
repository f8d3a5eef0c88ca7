"""A TCPStore server on one port: torch's clients, and control links if a link handler is given.

The first request of a connection decides what it is. VALIDATE makes it a client of the store: `RequestReader` decodes
its requests, `RequestExecutor` executes them. LINK hands the connection to the link handler.

No client can block or starve the others: clients take turns, a client that does not read its answers is not read from,
and a client that exceeds a limit (`wire.Limits`) is disconnected, logged, and counted by reason.

A connection is authenticated once its control link is, or once it is a client that `StoreClients` admits. TCPStore's
protocol has no credentials, so a client is known by the address of its pod, from which an agent has a control link,
or is about to open one (`expect_agents`). Connections that are not authenticated are few, hold few bytes, and never
displace others.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from elasticjob._runtime.contract.names import StoreClients
from elasticjob._runtime.store.client_connection import ClientConnection, LinkHandler
from elasticjob._runtime.store.connections import Connections
from elasticjob._runtime.store.executor import RequestExecutor
from elasticjob._runtime.store.last_requests import LastRequests
from elasticjob._runtime.store.reader import KnownRequests, RequestReader
from elasticjob._runtime.store.storage import Storage
from elasticjob._runtime.store.wire import Limits, Request, WireError
from elasticjob._runtime.system.sockets.listening_socket import ALL_ADDRESSES, listen_on_all_addresses

_BACKLOG = 4096
"""Connections that wait until the server accepts them."""
_ACCEPTED_AT_ONCE = 128
"""Connections accepted before those that are open are served again."""
_RECEIVE_BYTES = 256 * 1024
"""Bytes received at once. asyncio's own buffer is as large, but new for each read, which takes longer than the rest."""


class StoreServer:
    """Serves one store in the running event loop. Without `links`, LINK requests are refused."""

    def __init__(
        self,
        *,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        links: LinkHandler | None = None,
        clients: StoreClients = StoreClients.ANY,
        last_requests: LastRequests | None = None,
    ) -> None:
        """`last_requests` keeps the requests to execute for clients that are lost; None: clients may not name any."""
        self.connections = Connections(limits, clients)
        self.counters = self.connections.counters
        self._last_requests = last_requests
        self.serve_link = links
        self.storage = Storage(limits.memory, limits.value)
        self.known_requests = KnownRequests()
        self.received = memoryview(bytearray(_RECEIVE_BYTES))
        """Where the bytes of all clients arrive. Each client copies its own at once."""
        self.clients: set[ClientConnection] = set()
        self.slow_readers: set[ClientConnection] = set()
        """Clients with more than `limits.write_buffer` bytes of unread answers."""
        self.link_tasks: set[asyncio.Task[None]] = set()
        """One task for each connection that the link handler serves."""
        self._server: asyncio.Server | None = None

    async def start(self, host: str = ALL_ADDRESSES, port: int = 0, *, sock: socket.socket | None = None) -> int:
        """Listen and return the bound port. OSError: the address is in use.

        `host` is an IP address; "::" includes IPv4, and is IPv4 where the host has no IPv6. `sock`, if given, is a
        listening socket that is used instead of `host` and `port`.
        """
        sock = sock or _listen(host, port)
        # asyncio's `backlog` is also the number of connections that it accepts at once.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(self), sock=sock, backlog=_ACCEPTED_AT_ONCE
        )
        sock.listen(_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def limits(self) -> Limits:
        """The limits of connections and requests. `allow_connections` changes those of connections."""
        return self.connections.limits

    def allow_connections(
        self,
        count: int,
        unauthenticated: int = Limits.unauthenticated,
        unauthenticated_bytes: int = Limits.unauthenticated_bytes,
    ) -> None:
        """Set the limits of open connections, from the next connection on. The arguments are fields of `Limits`."""
        self.connections.limits = replace(
            self.limits,
            connections=count,
            unauthenticated=unauthenticated,
            unauthenticated_bytes=unauthenticated_bytes,
        )

    def expect_agents(self, addresses: Iterable[str]) -> None:
        """Admit the clients on these addresses, whose agents are about to open their control links.

        As `Connections.expect_agents`.
        """
        self.connections.expect_agents(addresses)

    @property
    def open_connections(self) -> int:
        """Number of open connections, of clients and links."""
        return self.connections.open

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for client in tuple(self.clients):
            client.close()
        for task in tuple(self.link_tasks):
            task.cancel()
        await asyncio.gather(*self.link_tasks, return_exceptions=True)

    def set_last_requests(self, client: ClientConnection, request: Request) -> None:
        """Keep what to execute when a client is lost. WireError: this server keeps nothing."""
        if self._last_requests is None:
            raise WireError("unknown-operation", "this server executes no requests of clients that are lost")
        try:
            self._last_requests.set(client, request.keys[0], request.values[0])
        except ValueError as error:
            raise WireError("bad-last-requests", str(error)) from None

    def execute_last_requests(self, client: ClientConnection) -> None:
        """Execute the requests of a client whose last connection has closed."""
        encoded = self._last_requests.closed(client) if self._last_requests is not None else b""
        reader, executor = RequestReader(self.limits), RequestExecutor(self.storage, self.limits.reply, lambda: None)
        reader.feed(encoded)
        with suppress(WireError):  # its sender is gone
            while request := reader.next():
                executor.execute(request)


def _listen(host: str, port: int) -> socket.socket:
    if host == ALL_ADDRESSES:
        return listen_on_all_addresses(port, backlog=_BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
