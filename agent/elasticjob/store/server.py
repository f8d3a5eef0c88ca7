"""A TCPStore server: torch's clients on one side, control links (if a gate is given) on the same port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from elasticjob.keep_alive import KeepAlive
from elasticjob.store.executor import RequestExecutor
from elasticjob.store.reader import RequestReader
from elasticjob.store.storage import Storage
from elasticjob.store.wire import MAGIC, Limits, Op, Request, WireError

log = logging.getLogger(__name__)

Drop: TypeAlias = Callable[[str, str, str], None]
"""Counts and logs a dropped peer: (reason, peer, message)."""
TakeOver: TypeAlias = Callable[[asyncio.Transport, int, bytes, Drop], Coroutine[None, None, None]]
"""Serves a connection that opened with Op.LINK: (transport, the client's number, bytes that followed, drop)."""

_BACKLOG = 4096
_TURN_REQUESTS, _TURN_BYTES = 256, 1024 * 1024
"""What one client is served before the others have their turn."""
_KEEP_ALIVE = KeepAlive(interval=15, max_attempts=4)
"""For plain clients, who may wait for hours: only that hosts which vanished do not hold their place for ever."""
_LOGGED_DROPS = 20


@dataclass
class Counters:
    """What a server has seen since its start."""

    connections: int = 0
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Connections closed by us, by reason."""


class StoreServer:
    """Serves one store's keys in the running event loop. Without `links` the link operation is refused."""

    def __init__(self, *, limits: Limits = Limits(), links: TakeOver | None = None) -> None:  # noqa: B008
        self.limits = limits
        self.serve_link = links
        self.counters = Counters()
        self.storage = Storage(limits.memory, limits.value)
        self.clients: set[_Client] = set()
        self.slow_readers: set[_Client] = set()
        """Clients who leave their answers unread."""
        self.link_tasks: set[asyncio.Task[None]] = set()
        """Links, from their first byte on."""
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "0.0.0.0", port: int = 0, *, sock: socket.socket | None = None) -> int:  # noqa: S104
        """Listen (on `sock`, if given; on IPv4 too where `host` is "::"); the bound port. OSError: address taken."""
        if sock is None and host == "::" and socket.has_dualstack_ipv6():
            sock = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        loop = asyncio.get_running_loop()
        if sock is None:
            self._server = await loop.create_server(lambda: _Client(self), host, port, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(lambda: _Client(self), sock=sock, backlog=_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for client in tuple(self.clients):
            client.close()
        for task in tuple(self.link_tasks):
            task.cancel()
        await asyncio.gather(*self.link_tasks, return_exceptions=True)

    def drop(self, reason: str, peer: str, message: str) -> None:
        """Count, and say so in the log until it says the same for the twentieth time."""
        self.counters.dropped[reason] += 1
        if self.counters.dropped[reason] <= _LOGGED_DROPS:
            log.warning("dropped %s: %s", peer, message)


class _Client(asyncio.Protocol):
    """One connection of a TCPStore client, until it ends or becomes a link."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._store = server.storage
        self._reader = RequestReader(server.limits)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the client has not said what it is, has sent half a request, or leaves its answers unread."""
        self._valid = False
        self._reading = True
        # A wait ends in another client's turn, or in this one after what it was answered before.
        self._answers = RequestExecutor(self._store, server.limits.reply, self._flush)
        self._held = 0
        """Bytes of unfinished requests, counted as the store's memory."""

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        server, limits = self._server, self._server.limits
        server.clients.add(self)
        server.counters.connections += 1
        self._transport.set_write_buffer_limits(high=limits.write_buffer)
        _KEEP_ALIVE.apply(self._transport.get_extra_info("socket"))
        if len(server.clients) + len(server.link_tasks) > limits.connections:
            self._drop("too-many-connections", "too many connections")
        else:
            self._start_timer(limits.opening_timeout, "silent", "did not say what it is")

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()

    def pause_writing(self) -> None:
        server = self._server
        server.slow_readers.add(self)
        unread = sum(client._transport.get_write_buffer_size() for client in server.slow_readers)
        if unread > server.limits.total_write_buffer:
            self._drop("slow-reader", f"{len(server.slow_readers)} clients leave {unread} bytes unread")
        else:
            self._start_timer(server.limits.stall_timeout, "slow-reader", "does not read its answers")

    def resume_writing(self) -> None:
        self._server.slow_readers.discard(self)
        self._stop_timer()
        self._take_turn()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._take_turn()

    def _take_turn(self) -> None:
        try:
            self._serve()
            if self._held or self._reader.pending:
                self._hold()
                self._expect_the_rest()
        except WireError as error:
            self._drop(error.reason, str(error))

    def _serve(self) -> None:
        """Serve what has arrived. A client with much more to ask, or that does not read, is not read from."""
        if self._transport.is_closing():
            return
        try:
            more = self._serve_some()
        finally:
            self._flush()
        if self._transport.is_closing():
            return
        full = self in self._server.slow_readers
        self._read(not (more or full))
        if more and not full:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _serve_some(self) -> bool:
        """Whether there may be more that has arrived."""
        for _ in range(_TURN_REQUESTS):
            if self._answers.size > _TURN_BYTES or self in self._server.slow_readers:
                break
            request = self._reader.next()
            if request is None or self._take(request):
                return False
        return True

    def _read(self, on: bool) -> None:
        if on != self._reading:
            self._reading = on
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def _hold(self) -> None:
        pending = 0 if self._transport.is_closing() else self._reader.pending
        self._store.account(pending - self._held)
        self._held = pending

    def _expect_the_rest(self) -> None:
        """Who stops in the middle of a request holds memory that others need."""
        if not self._valid or self in self._server.slow_readers or self._transport.is_closing():
            return
        self._stop_timer()
        if self._held:
            self._start_timer(self._server.limits.stall_timeout, "half-sent", "does not send the rest of its request")

    # ---- requests

    def _take(self, request: Request) -> bool:
        """True when the connection has become a link."""
        if self._valid:
            self._server.counters.requests += 1
            self._answers.execute(request)
            return False
        if request.op is Op.LINK and self._server.serve_link is not None:
            self._become_link(self._server.serve_link, request.number)
            return True
        self._validate(request)
        return False

    def _validate(self, request: Request) -> None:
        if request.op is not Op.VALIDATE or request.number != MAGIC:
            # SET was operation 0 before torch 2.2, and the length of its key looks like a small number.
            short = request.op is Op.VALIDATE and request.number <= self._server.limits.key
            if short or Op.VALIDATE < request.op <= Op.CANCEL_WAIT:
                raise WireError("old-dialect", "opens as torch 2.1 and older do; torch 2.4 or newer is needed")
            raise WireError("not-a-tcpstore", "is no TCPStore client")
        self._valid = True
        self._stop_timer()

    def _flush(self) -> None:
        if answers := self._answers.take():
            self._transport.write(answers)

    # ---- ends

    def _become_link(self, take_over: TakeOver, number: int) -> None:
        rest = self._reader.rest()
        self._let_go()
        task = asyncio.ensure_future(take_over(self._transport, number, rest, self._server.drop))
        self._server.link_tasks.add(task)
        task.add_done_callback(self._server.link_tasks.discard)

    def _drop(self, reason: str, message: str) -> None:
        peer = self._transport.get_extra_info("peername")
        self._server.drop(reason, f"{peer[0]}:{peer[1]}" if peer else "a client", message)
        self._transport.abort()

    def close(self) -> None:
        """Close once what was answered has been sent."""
        self._transport.close()

    def _start_timer(self, seconds: float, reason: str, message: str) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._drop, reason, message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_go(self) -> None:
        self._stop_timer()
        self._answers.cancel_wait()
        self._store.account(-self._held)
        self._held = 0
        self._server.clients.discard(self)
        self._server.slow_readers.discard(self)
