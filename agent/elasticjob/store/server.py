"""A TCPStore server on one port: torch's clients, and control links if a link handler is given.

The first request of a connection decides what it is. VALIDATE makes it a client of the store: `RequestReader` decodes
its requests, `RequestExecutor` executes them. LINK hands the connection to the link handler.

No client can block or starve the others: clients take turns, a client that does not read its answers is not read from,
and a client that exceeds a limit (`wire.Limits`) is disconnected, logged, and counted by reason.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from elasticjob.keep_alive import KeepAlive
from elasticjob.store.executor import RequestExecutor
from elasticjob.store.reader import RequestReader
from elasticjob.store.storage import Storage
from elasticjob.store.wire import MAGIC, Limits, Op, Request, WireError

log = logging.getLogger(__name__)

RecordDrop: TypeAlias = Callable[[str, str, str], None]
"""Counts and logs a connection that we close: (reason, peer, message). `reason` is a fixed text, for counting."""
LinkHandler: TypeAlias = Callable[[asyncio.Transport, int, bytes, RecordDrop], Coroutine[None, None, None]]
"""Serves a connection whose first request was LINK: (transport, the peer's protocol version, further bytes,
RecordDrop)."""

_BACKLOG = 4096
_TURN_REQUESTS, _TURN_BYTES = 256, 1024 * 1024
"""Requests executed and bytes answered in one client's turn, before other clients are served."""
_KEEP_ALIVE = KeepAlive(interval=15, max_attempts=4)
"""For plain clients. They may wait for hours; keep-alive only frees the connections of hosts that vanished."""
_LOGGED_DROPS = 20
"""Closed connections logged for each reason; later ones are only counted."""


@dataclass
class Counters:
    """Totals since the server's start."""

    connections: int = 0
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Connections that the server closed, by reason."""


class StoreServer:
    """Serves one store in the running event loop. Without `links`, LINK requests are refused."""

    def __init__(self, *, limits: Limits = Limits(), links: LinkHandler | None = None) -> None:  # noqa: B008
        self.limits = limits
        self.serve_link = links
        self.counters = Counters()
        self.storage = Storage(limits.memory, limits.value)
        self.clients: set[_Client] = set()
        self.slow_readers: set[_Client] = set()
        """Clients with more than `limits.write_buffer` bytes of unread answers."""
        self.link_tasks: set[asyncio.Task[None]] = set()
        """One task for each connection that the link handler serves."""
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "0.0.0.0", port: int = 0, *, sock: socket.socket | None = None) -> int:  # noqa: S104
        """Listen and return the bound port. OSError: the address is in use.

        `host` "::" includes IPv4. `sock`, if given, is a listening socket that is used instead of `host` and `port`.
        """
        if sock is None and host == "::" and socket.has_dualstack_ipv6():
            sock = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        loop = asyncio.get_running_loop()
        if sock is None:
            self._server = await loop.create_server(lambda: _Client(self), host, port, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(lambda: _Client(self), sock=sock, backlog=_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    def allow_connections(self, count: int) -> None:
        """Set the limit of open connections, from the next connection on."""
        self.limits = replace(self.limits, connections=count)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for client in tuple(self.clients):
            client.close()
        for task in tuple(self.link_tasks):
            task.cancel()
        await asyncio.gather(*self.link_tasks, return_exceptions=True)

    def record_drop(self, reason: str, peer: str, message: str) -> None:
        """Count a connection that we close, and log the first `_LOGGED_DROPS` of each reason."""
        self.counters.dropped[reason] += 1
        if self.counters.dropped[reason] <= _LOGGED_DROPS:
            log.warning("closed the connection of %s: %s", peer, message)


class _Client(asyncio.Protocol):
    """One connection, until it ends or becomes a control link."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._store = server.storage
        self._reader = RequestReader(server.limits)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        """Closes the connection. Runs until the first request, during an incomplete request, and for a slow reader."""
        self._valid = False
        """Whether the client has sent VALIDATE."""
        self._reading = True
        # A pending wait can end during this client's own turn; the executor keeps its answers in order.
        self._executor = RequestExecutor(self._store, server.limits.reply, self._flush)
        self._held = 0
        """Bytes of an incomplete request that are counted against the store's memory limit."""

    # ---- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        server, limits = self._server, self._server.limits
        server.clients.add(self)
        server.counters.connections += 1
        self._transport.set_write_buffer_limits(high=limits.write_buffer)
        _KEEP_ALIVE.apply(self._transport.get_extra_info("socket"))
        if len(server.clients) + len(server.link_tasks) > limits.connections:
            self._drop("too-many-connections", f"the limit of {limits.connections} connections is reached")
        else:
            self._start_timer(limits.opening_timeout, "silent", "it did not send its first request in time")

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()

    def pause_writing(self) -> None:
        server = self._server
        server.slow_readers.add(self)
        unread = sum(client._transport.get_write_buffer_size() for client in server.slow_readers)
        if unread > server.limits.total_write_buffer:
            self._drop("slow-reader", f"it and other slow readers leave {unread} bytes unread")
        else:
            self._start_timer(server.limits.stall_timeout, "slow-reader", "it does not read its answers")

    def resume_writing(self) -> None:
        self._server.slow_readers.discard(self)
        self._stop_timer()
        self._take_turn()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._take_turn()

    # ---- turns

    def _take_turn(self) -> None:
        try:
            self._serve()
            if self._held or self._reader.pending:
                self._account_pending()
                self._time_incomplete_request()
        except WireError as error:
            self._drop(error.reason, str(error))

    def _serve(self) -> None:
        """Serve requests that have arrived, and decide whether to go on reading from the client."""
        if self._transport.is_closing():
            return
        try:
            more = self._serve_some()
        finally:
            self._flush()
        if self._transport.is_closing():
            return
        slow = self in self._server.slow_readers
        self._set_reading(not (more or slow))
        if more and not slow:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _serve_some(self) -> bool:
        """Serve one turn's requests; return whether more may have arrived."""
        for _ in range(_TURN_REQUESTS):
            if self._executor.size > _TURN_BYTES or self in self._server.slow_readers:
                break
            request = self._reader.next()
            if request is None or self._handle(request):
                return False
        return True

    def _set_reading(self, on: bool) -> None:
        if on != self._reading:
            self._reading = on
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def _account_pending(self) -> None:
        pending = 0 if self._transport.is_closing() else self._reader.pending
        self._store.account(pending - self._held)
        self._held = pending

    def _time_incomplete_request(self) -> None:
        # A client that pauses within a request holds memory that others need.
        if not self._valid or self in self._server.slow_readers or self._transport.is_closing():
            return
        self._stop_timer()
        if self._held:
            self._start_timer(self._server.limits.stall_timeout, "half-sent", "it stopped within a request")

    # ---- requests

    def _handle(self, request: Request) -> bool:
        """Handle one request; return whether the connection has become a control link."""
        if self._valid:
            self._server.counters.requests += 1
            self._executor.execute(request)
            return False
        if request.op is Op.LINK and self._server.serve_link is not None:
            self._become_link(self._server.serve_link, request.number)
            return True
        self._validate(request)
        return False

    def _validate(self, request: Request) -> None:
        if request.op is not Op.VALIDATE or request.number != MAGIC:
            # In torch 2.1 SET was operation 0; the length of its key is then read as the magic number.
            old_set = request.op is Op.VALIDATE and request.number <= self._server.limits.key
            if old_set or Op.VALIDATE < request.op <= Op.CANCEL_WAIT:
                raise WireError("old-dialect", "it uses the protocol of torch 2.1 or older; use torch 2.4 or newer")
            raise WireError("not-a-tcpstore", "it is not a TCPStore client")
        self._valid = True
        self._stop_timer()

    def _flush(self) -> None:
        if answers := self._executor.take():
            self._transport.write(answers)

    # ---- end of the connection

    def _become_link(self, handler: LinkHandler, number: int) -> None:
        rest = self._reader.rest()
        self._release()
        task = asyncio.ensure_future(handler(self._transport, number, rest, self._server.record_drop))
        self._server.link_tasks.add(task)
        task.add_done_callback(self._server.link_tasks.discard)

    def _drop(self, reason: str, message: str) -> None:
        peer = self._transport.get_extra_info("peername")
        self._server.record_drop(reason, f"{peer[0]}:{peer[1]}" if peer else "a client", message)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after all answers have been sent."""
        self._transport.close()

    def _start_timer(self, seconds: float, reason: str, message: str) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._drop, reason, message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        self._stop_timer()
        self._executor.cancel_wait()
        self._store.account(-self._held)
        self._held = 0
        self._server.clients.discard(self)
        self._server.slow_readers.discard(self)
