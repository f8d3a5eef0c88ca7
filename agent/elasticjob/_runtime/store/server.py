"""A TCPStore server on one port: torch's clients, and control links if a link handler is given.

The first request of a connection decides what it is. VALIDATE makes it a client of the store: `RequestReader` decodes
its requests, `RequestExecutor` executes them. LINK hands the connection to the link handler.

No client can block or starve the others: clients take turns, a client that does not read its answers is not read from,
and a client that exceeds a limit (`wire.Limits`) is disconnected, logged, and counted by reason.

A connection is authenticated once its control link is, or once it is a client that `StoreClients` admits. TCPStore's
protocol has no credentials, so a client is known by the address of its node: the node has a control link from there, or
is about to open one (`expect_nodes`). Connections that are not authenticated are few, hold few bytes, and never
displace others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from elasticjob._runtime.contract.names import StoreClients
from elasticjob._runtime.store.executor import RequestExecutor
from elasticjob._runtime.store.last_requests import LastRequests
from elasticjob._runtime.store.reader import KnownRequests, RequestReader
from elasticjob._runtime.store.storage import Storage
from elasticjob._runtime.store.wire import MAGIC, Limits, Op, Request, WireError
from elasticjob._runtime.system.ip_addresses import endpoint_text, plain_address
from elasticjob._runtime.system.keep_alive import KeepAlive
from elasticjob._runtime.system.listening_socket import ALL_ADDRESSES, listen_on_all_addresses
from elasticjob._runtime.system.loop_errors import background_task

log = logging.getLogger(__name__)

_BACKLOG = 4096
"""Connections that wait until the server accepts them."""
_ACCEPTED_AT_ONCE = 128
"""Connections accepted before those that are open are served again."""
_TURN_REQUESTS, _TURN_BYTES = 256, 1024 * 1024
"""Requests executed and bytes answered in one client's turn, before other clients are served."""
_RECEIVE_BYTES = 256 * 1024
"""Bytes received at once. asyncio's own buffer is as large, but new for each read, which takes longer than the rest."""
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


class Peer:
    """One connection as its server counts it, whatever it becomes. The link handler reports its progress here."""

    def __init__(self, server: StoreServer, transport: asyncio.Transport) -> None:
        self.transport = transport
        name = transport.get_extra_info("peername")
        self.address = _address_of(name)
        """IP address of the other side."""
        self.name = endpoint_text(self.address, name[1]) if name else "a client"
        self._server = server
        self._dropped = self._ended = self._is_node = False

    def record_drop(self, reason: str, message: str) -> None:
        """Count and log that we close the connection, once. `reason` is a fixed text, for counting."""
        if not self._dropped:
            self._dropped = True
            self._server.record_drop(reason, self.name, message)

    def drop(self, reason: str, message: str) -> None:
        """Close the connection at once; count and log it."""
        self.record_drop(reason, message)
        self.transport.abort()
        self.end()

    def authenticated(self, *, is_node: bool = False) -> None:
        """Note that the connection is authenticated; `is_node`: it is a node's link, so that its address is known."""
        if self._ended:
            return
        self._server.unauthenticated.pop(self, None)
        if is_node:
            self._is_node = True
            self._server.add_node(self.address)

    def end(self) -> None:
        """Note that the connection has ended."""
        if self._ended:
            return
        self._ended = True
        self._server.open_connections -= 1
        self._server.unauthenticated.pop(self, None)
        if self._is_node:
            self._server.remove_node(self.address)

    @property
    def is_local(self) -> bool:
        """Whether both sides have the same address."""
        return bool(self.address) and self.address == _address_of(self.transport.get_extra_info("sockname"))


LinkHandler: TypeAlias = Callable[[Peer, int, bytes], Coroutine[None, None, None]]
"""Serves a connection whose first request was LINK: (peer, its protocol version, further bytes)."""


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
        """`last_requests`: what clients ask for in case that they are lost; None: they may not."""
        self.limits = limits
        self._last_requests = last_requests
        self.serve_link = links
        self.admits = clients
        self.counters = Counters()
        self.storage = Storage(limits.memory, limits.value)
        self.known_requests = KnownRequests()
        self.received = memoryview(bytearray(_RECEIVE_BYTES))
        """Where the bytes of all clients arrive. Each client copies its own at once."""
        self.clients: set[_Client] = set()
        self.slow_readers: set[_Client] = set()
        """Clients with more than `limits.write_buffer` bytes of unread answers."""
        self.link_tasks: set[asyncio.Task[None]] = set()
        """One task for each connection that the link handler serves."""
        self.open_connections = 0
        self.unauthenticated: OrderedDict[Peer, None] = OrderedDict()
        """Connections that are not authenticated yet, the oldest first."""
        self.waiting: dict[str, set[_Client]] = {}
        """Clients that wait for their node's control link, by address."""
        self._nodes: Counter[str] = Counter()
        """Number of nodes' control links, by address."""
        self._expected: set[str] = set()
        """Addresses of nodes that are about to open their control links."""
        self._expected_until = -math.inf
        """Until when clients on these addresses are admitted; loop time."""
        self._server: asyncio.Server | None = None

    async def start(self, host: str = ALL_ADDRESSES, port: int = 0, *, sock: socket.socket | None = None) -> int:
        """Listen and return the bound port. OSError: the address is in use.

        `host` is an IP address; "::" includes IPv4, and is IPv4 where the machine has no IPv6. `sock`, if given, is a
        listening socket that is used instead of `host` and `port`.
        """
        sock = sock or _listen(host, port)
        # asyncio's `backlog` is also the number of connections that it accepts at once.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Client(self), sock=sock, backlog=_ACCEPTED_AT_ONCE
        )
        sock.listen(_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    def allow_connections(
        self,
        count: int,
        unauthenticated: int = Limits.unauthenticated,
        unauthenticated_bytes: int = Limits.unauthenticated_bytes,
    ) -> None:
        """Set the limits of open connections, from the next connection on. The arguments are fields of `Limits`."""
        self.limits = replace(
            self.limits,
            connections=count,
            unauthenticated=unauthenticated,
            unauthenticated_bytes=unauthenticated_bytes,
        )

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

    def add(self, peer: Peer) -> None:
        """Count a new connection. One too many closes the oldest one that is not authenticated."""
        limits = self.limits
        self.counters.connections += 1
        self.open_connections += 1
        self.unauthenticated[peer] = None
        if len(self.unauthenticated) > limits.unauthenticated:
            problem = "too-many-unauthenticated", f"{limits.unauthenticated} younger ones are not authenticated either"
        elif self.open_connections > limits.connections:
            problem = "too-many-connections", f"the limit of {limits.connections} connections is reached"
        else:
            return
        next(iter(self.unauthenticated)).drop(*problem)

    def is_admitted(self, peer: Peer) -> bool:
        """Return whether a client may use the store's operations now. WireError: it never may."""
        if self.admits is StoreClients.NONE:
            raise WireError("no-tcpstore", "this store has control links only: its job does not use it as a TCPStore")
        return self.admits is StoreClients.ANY or peer.is_local or self._is_address_of_node(peer.address)

    def _is_address_of_node(self, address: str) -> bool:
        if address in self._nodes:
            return True
        return address in self._expected and asyncio.get_running_loop().time() < self._expected_until

    def set_last_requests(self, client: _Client, request: Request) -> None:
        """Keep what to execute when a client is lost. WireError: this server keeps nothing."""
        if self._last_requests is None:
            raise WireError("unknown-operation", "this server executes no requests of clients that are lost")
        try:
            self._last_requests.set(client, request.keys[0], request.values[0])
        except ValueError as error:
            raise WireError("bad-last-requests", str(error)) from None

    def execute_last_requests(self, client: _Client) -> None:
        """Execute the requests of a client whose last connection has closed."""
        encoded = self._last_requests.closed(client) if self._last_requests is not None else b""
        reader, executor = RequestReader(self.limits), RequestExecutor(self.storage, self.limits.reply, lambda: None)
        reader.feed(encoded)
        with suppress(WireError):  # its sender is gone
            while request := reader.next():
                executor.execute(request)

    def expect_nodes(self, addresses: Iterable[str]) -> None:
        """Admit the clients on these addresses, whose nodes are about to open their control links.

        They are admitted for `Limits.link_timeout`. The first link from an address ends that for this address, which is
        then admitted while it has a link. A host name has no effect, and neither has an address in another form than
        the kernel's: the clients there wait for the link.
        """
        self._expected = {plain_address(address) for address in addresses} - self._nodes.keys()
        self._expected_until = asyncio.get_running_loop().time() + self.limits.link_timeout
        for address in self._expected:
            self._admit_waiting(address)

    def add_node(self, address: str) -> None:
        """Admit the clients on a node's address, from which it has opened a control link."""
        self._nodes[address] += 1
        self._expected.discard(address)
        self._admit_waiting(address)

    def _admit_waiting(self, address: str) -> None:
        for client in self.waiting.pop(address, ()):
            client.admit()

    def add_waiting(self, client: _Client) -> None:
        """Let a client wait for its node's control link."""
        self.waiting.setdefault(client.peer.address, set()).add(client)

    def remove_waiting(self, client: _Client) -> None:
        """Forget a client that waited and has ended."""
        others = self.waiting[client.peer.address]
        others.discard(client)
        if not others:
            del self.waiting[client.peer.address]

    def remove_node(self, address: str) -> None:
        """Note that one of the address's control links has ended: without another one it admits no further client."""
        self._nodes[address] -= 1
        if not self._nodes[address]:
            del self._nodes[address]


def _listen(host: str, port: int) -> socket.socket:
    if host == ALL_ADDRESSES:
        return listen_on_all_addresses(port, backlog=_BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _address_of(name: tuple[str, int] | None) -> str:
    """Return the IP address of a socket's name; an IPv4 address has one form on sockets of both families."""
    return plain_address(name[0]) if name else ""


class _Client(asyncio.BufferedProtocol):
    """One connection, until it ends or becomes a control link."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._store = server.storage
        self._reader = RequestReader(server.limits, server.known_requests)
        self._transport: asyncio.Transport
        self.peer: Peer
        self._timer: asyncio.TimerHandle | None = None
        """Closes the connection. Runs until the first request, during an incomplete request, and for a slow reader."""
        self._served = False
        """Whether the client has sent VALIDATE and is admitted."""
        self._waits = False
        """Whether the client has sent VALIDATE and waits for its node's control link."""
        self._reading = True
        # A pending wait can end during this client's own turn; the executor keeps its answers in order.
        self._executor = RequestExecutor(self._store, server.limits.reply, self._flush)
        self._held = 0
        """Bytes of an incomplete request that are counted against the store's memory limit."""

    # ---- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        server, limits = self._server, self._server.limits
        self.peer = Peer(server, self._transport)
        self._start_timer(limits.opening_timeout, "silent", "it did not send its first request in time")
        server.clients.add(self)
        server.add(self.peer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self.peer.end()
        self._server.execute_last_requests(self)

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

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.received

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed(bytes(self._server.received[:nbytes]))
        self._take_turn()

    # ---- turns

    def _take_turn(self) -> None:
        try:
            self._serve()
            if not self._served:
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
        if self._transport.is_closing() or self._waits:
            return
        try:
            more = self._serve_some()
        finally:
            self._flush()
        if self._transport.is_closing():
            return
        slow = self in self._server.slow_readers
        self._set_reading(not (more or slow or self._waits))
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
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def _account_pending(self) -> None:
        pending = 0 if self._transport.is_closing() else self._reader.pending
        self._store.account(pending - self._held)
        self._held = pending

    def _time_incomplete_request(self) -> None:
        # A client that pauses within a request holds memory that others need.
        if self in self._server.slow_readers or self._transport.is_closing():
            return
        self._stop_timer()
        if self._held:
            self._start_timer(self._server.limits.stall_timeout, "half-sent", "it stopped within a request")

    # ---- requests

    def _handle(self, request: Request) -> bool:
        """Handle one request; return whether the next one may be handled now."""
        if self._served:
            self._server.counters.requests += 1
            if request.op is Op.WHEN_LOST:
                self._server.set_last_requests(self, request)
            else:
                self._executor.execute(request)
            return True
        if request.op is Op.LINK and self._server.serve_link is not None:
            self._become_link(self._server.serve_link, request.number)
            return False
        self._validate(request)
        if self._server.is_admitted(self.peer):
            self._begin()
        else:
            self._start_timer(
                self._server.limits.link_timeout, "no-link", "no node of this job has a control link from its address"
            )
            self._waits = True
            self._server.add_waiting(self)
        return self._served

    def _validate(self, request: Request) -> None:
        if request.op is not Op.VALIDATE or request.number != MAGIC:
            # In torch 2.1 SET was operation 0; the length of its key is then read as the magic number.
            old_set = request.op is Op.VALIDATE and request.number <= self._server.limits.key
            if old_set or Op.VALIDATE < request.op <= Op.CANCEL_WAIT:
                raise WireError("old-dialect", "it uses the protocol of torch 2.1 or older; use torch 2.4 or newer")
            raise WireError("not-a-tcpstore", "it is not a TCPStore client")

    def _begin(self) -> None:
        """Serve the client from now on."""
        self._served = True
        self._stop_timer()
        self.peer.authenticated()
        self._transport.set_write_buffer_limits(high=self._server.limits.write_buffer)
        _KEEP_ALIVE.apply(self._transport.get_extra_info("socket"))

    def admit(self) -> None:
        """Serve the client, whose address is admitted now. The server has taken it out of those that wait."""
        self._waits = False
        self._begin()
        asyncio.get_running_loop().call_soon(self._take_turn)

    def _flush(self) -> None:
        if answers := self._executor.take():
            self._transport.write(answers)

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
        if self._waits:
            self._waits = False
            self._server.remove_waiting(self)
        for group in (self._server.clients, self._server.slow_readers):
            group.discard(self)
