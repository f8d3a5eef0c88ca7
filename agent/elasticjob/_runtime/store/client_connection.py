"""One connection of a store's server: the client's turns, its requests, its time-outs, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, cast

from elasticjob._runtime.store.connections import Peer
from elasticjob._runtime.store.executor import RequestExecutor
from elasticjob._runtime.store.reader import RequestReader
from elasticjob._runtime.store.wire import MAGIC, Op, Request, WireError
from elasticjob._runtime.system.loop_errors import background_task
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive

if TYPE_CHECKING:
    from elasticjob._runtime.store.server import StoreServer

_TURN_REQUESTS, _TURN_BYTES = 256, 1024 * 1024
"""Requests executed and bytes answered in one client's turn, before other clients are served."""
_KEEP_ALIVE = KeepAlive(interval=15, max_attempts=4)
"""For plain clients. They may wait for hours; keep-alive only frees the connections of hosts that vanished."""

LinkHandler: TypeAlias = Callable[[Peer, int, bytes], Coroutine[None, None, None]]
"""Serves a connection whose first request was LINK: (peer, its protocol version, further bytes)."""


class Admission(Enum):
    """How far a client has come before its requests are executed."""

    NEW = "NEW"
    """It has not sent VALIDATE yet."""
    WAITS = "WAITS"
    """It has sent VALIDATE, and waits for its agent's control link."""
    ADMITTED = "ADMITTED"


_NEW, _WAITS, _ADMITTED = Admission  # read with each request


class ClientConnection(asyncio.BufferedProtocol):
    """One connection, until it ends or becomes a control link."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._store = server.storage
        self._reader = RequestReader(server.limits, server.known_requests)
        self.transport: asyncio.Transport
        self.peer: Peer
        self.timer: asyncio.TimerHandle | None = None
        """Closes the connection. Runs until the first request, during an incomplete request, and for a slow reader."""
        self._admission = _NEW
        self._reading = True
        # A pending wait can end during this client's own turn; the executor keeps its answers in order.
        self._executor = RequestExecutor(self._store, server.limits.reply, self._flush)
        self._held = 0
        """Bytes of an incomplete request that are counted against the store's memory limit."""

    # ---- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        server, limits = self._server, self._server.limits
        self.peer = Peer(server.connections, self.transport)
        self._start_timer(limits.opening_timeout, "silent", "it did not send its first request in time")
        server.clients.add(self)
        server.connections.add(self.peer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self.peer.end()
        self._server.execute_last_requests(self)

    def pause_writing(self) -> None:
        server = self._server
        server.slow_readers.add(self)
        unread = sum(client.unread for client in server.slow_readers)
        if unread > server.limits.total_write_buffer:
            self._drop("slow-reader", f"it and other slow readers leave {unread} bytes unread")
        else:
            self._start_timer(server.limits.stall_timeout, "slow-reader", "it does not read its answers")

    def resume_writing(self) -> None:
        self._server.slow_readers.discard(self)
        self._stop_timer()
        self._take_turn()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.received

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed(bytes(self._server.received[:nbytes]))
        self._take_turn()

    # ---- turns

    def _take_turn(self) -> None:
        try:
            self._serve()
            if self._admission is not _ADMITTED:
                self._check_unauthenticated()
            elif self._held or self._reader.pending:
                self._account_pending()
                self._time_incomplete_request()
        except WireError as error:
            self._drop(error.reason, str(error))

    def _check_unauthenticated(self) -> None:
        # Not counted against the memory of the store: that belongs to its clients.
        if self._reader.pending > self._server.limits.unauthenticated_bytes:
            raise WireError("too-much-unauthenticated", f"it sent {self._reader.pending} bytes before it was admitted")

    def _serve(self) -> None:
        """Serve requests that have arrived, and decide whether to go on reading from the client."""
        if self.transport.is_closing() or self._admission is _WAITS:
            return
        try:
            more = self._serve_some()
        finally:
            self._flush()
        if self.transport.is_closing():
            return
        slow = self in self._server.slow_readers
        self._set_reading(not (more or slow or self._admission is _WAITS))
        if more and not slow:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _serve_some(self) -> bool:
        """Serve one turn's requests; return whether more may have arrived."""
        for _ in range(_TURN_REQUESTS):
            if self._executor.size > _TURN_BYTES or self in self._server.slow_readers:
                break
            request = self._reader.next()
            if request is None or not self._handle(request):
                return False
        return True

    def _set_reading(self, on: bool) -> None:
        if on != self._reading:
            self._reading = on
            (self.transport.resume_reading if on else self.transport.pause_reading)()

    def _account_pending(self) -> None:
        pending = 0 if self.transport.is_closing() else self._reader.pending
        self._store.account(pending - self._held)
        self._held = pending

    def _time_incomplete_request(self) -> None:
        # A client that pauses within a request holds memory that others need.
        if self in self._server.slow_readers or self.transport.is_closing():
            return
        self._stop_timer()
        if self._held:
            self._start_timer(self._server.limits.stall_timeout, "half-sent", "it stopped within a request")

    # ---- requests

    def _handle(self, request: Request) -> bool:
        """Handle one request; return whether the next one may be handled now."""
        if self._admission is _ADMITTED:
            self._server.connections.counters.requests += 1
            if request.op is Op.WHEN_LOST:
                self._server.set_last_requests(self, request)
            else:
                self._executor.execute(request)
            return True
        if request.op is Op.LINK and self._server.serve_link is not None:
            self._become_link(self._server.serve_link, request.number)
            return False
        self._validate(request)
        if self._server.connections.is_admitted(self.peer):
            self._begin()
        else:
            self._start_timer(
                self._server.limits.link_timeout,
                "no-link",
                "no agent of this job has a control link from its address",
            )
            self._admission = _WAITS
            self._server.connections.add_waiting(self)
        return self._admission is _ADMITTED

    def _validate(self, request: Request) -> None:
        if request.op is not Op.VALIDATE or request.number != MAGIC:
            # In torch 2.1 SET was operation 0; the length of its key is then read as the magic number.
            old_set = request.op is Op.VALIDATE and request.number <= self._server.limits.key
            if old_set or Op.VALIDATE < request.op <= Op.CANCEL_WAIT:
                raise WireError("old-dialect", "it uses the protocol of torch 2.1 or older; use torch 2.4 or newer")
            raise WireError("not-a-tcpstore", "it is not a TCPStore client")

    def _begin(self) -> None:
        """Serve the client from now on."""
        self._admission = _ADMITTED
        self._stop_timer()
        self.peer.authenticated()
        self.transport.set_write_buffer_limits(high=self._server.limits.write_buffer)
        _KEEP_ALIVE.apply(self.transport.get_extra_info("socket"))

    def admit(self) -> None:
        """Serve the client, whose address is admitted now. It is no longer among those that wait."""
        self._begin()
        asyncio.get_running_loop().call_soon(self._take_turn)

    def _flush(self) -> None:
        if answers := self._executor.take():
            self.transport.write(answers)

    # ---- end of the connection

    def _become_link(self, handler: LinkHandler, number: int) -> None:
        rest = self._reader.rest()
        self._release()
        task = background_task(handler(self.peer, number, rest))
        self._server.link_tasks.add(task)
        task.add_done_callback(self._link_ended)

    def _link_ended(self, task: asyncio.Task[None]) -> None:
        self._server.link_tasks.discard(task)
        self.peer.end()

    def _drop(self, reason: str, message: str) -> None:
        self.peer.drop(reason, message)

    @property
    def unread(self) -> int:
        """Bytes of answers that the client has not read yet."""
        return self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection after all answers have been sent."""
        self.transport.close()

    def _start_timer(self, seconds: float, reason: str, message: str) -> None:
        self._stop_timer()
        self.timer = asyncio.get_running_loop().call_later(seconds, self._drop, reason, message)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _release(self) -> None:
        self._stop_timer()
        self._executor.cancel_wait()
        self._store.account(-self._held)
        self._held = 0
        if self._admission is _WAITS:
            self._admission = _NEW
            self._server.connections.remove_waiting(self)
        for group in (self._server.clients, self._server.slow_readers):
            group.discard(self)
