"""A TCPStore server: torch's clients on one side, control links (if a gate is given) on the same port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from elasticjob.store.link import LinkGate, accept
from elasticjob.store.storage import Storage, Waiter
from elasticjob.store.wire import MAGIC, Limits, Op, Request, RequestReader, WireError, i64, sized, u32

log = logging.getLogger(__name__)

_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
_BACKLOG = 4096


@dataclass
class Counters:
    """What a server has seen since its start."""

    connections: int = 0
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Connections closed by us, by reason."""


class StoreServer:
    """Serves one store's keys in the running event loop. Without `links` the link operation is refused."""

    def __init__(self, *, limits: Limits = Limits(), links: LinkGate | None = None) -> None:  # noqa: B008
        self.limits = limits
        self.links = links
        self.counters = Counters()
        self.storage = Storage(limits.memory)
        self.clients: set[_Client] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "0.0.0.0", port: int = 0, *, sock: socket.socket | None = None) -> int:  # noqa: S104
        """Listen (on `sock`, if given); the bound port. OSError when the address is taken."""
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
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def drop(self, reason: str, peer: str, message: str) -> None:
        self.counters.dropped[reason] += 1
        log.warning("dropped %s: %s", peer, message)


class _Client(asyncio.Protocol):
    """One connection of a TCPStore client, until it ends or becomes a link."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._store = server.storage
        self._reader = RequestReader(server.limits)
        self._transport: asyncio.Transport
        self._waiter: Waiter | None = None
        self._opening: asyncio.TimerHandle | None = None
        self._valid = False

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        server = self._server
        server.clients.add(self)
        server.counters.connections += 1
        self._transport.set_write_buffer_limits(high=server.limits.write_buffer)
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(server.clients) > server.limits.connections:
            self._drop("too-many-connections", "too many connections")
        else:
            loop = asyncio.get_running_loop()
            self._opening = loop.call_later(server.limits.opening, self._drop, "silent", "said nothing after it opened")

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()

    def pause_writing(self) -> None:
        self._drop("slow-reader", "does not read its answers")

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while not self._transport.is_closing() and (request := self._reader.next()) is not None:
                if self._take(request):
                    return
        except WireError as error:
            self._drop(error.reason, str(error))

    # ---- requests

    def _take(self, request: Request) -> bool:
        """True when the connection has become a link."""
        if self._valid:
            self._server.counters.requests += 1
            self._answer(request)
            return False
        if request.op is Op.LINK and self._server.links is not None:
            self._become_link(self._server.links, request.number)
            return True
        if request.op is not Op.VALIDATE or request.number != MAGIC:
            raise WireError("not-a-tcpstore", "does not open as torch 2.4 or newer does (or has no TCPStore client)")
        self._valid = True
        if self._opening is not None:
            self._opening.cancel()
        return False

    def _answer(self, request: Request) -> None:
        op, store, write = request.op, self._store, self._transport.write
        match op:
            case Op.SET:
                store.set(request.keys[0], request.values[0])
            case Op.GET:
                write(sized(store.get(request.keys[0])))
            case Op.ADD:
                write(i64(store.add(request.keys[0], request.number)))
            case Op.CHECK:
                write(_READY if store.check(request.keys) else _NOT_READY)
            case Op.WAIT:
                self._wait(store.wait(request.keys, self._stop_waiting))
            case Op.COMPARE_SET:
                write(sized(store.compare_set(request.keys[0], *request.values)))
            case Op.APPEND:
                store.append(request.keys[0], request.values[0])
            case Op.MULTI_GET:
                write(b"".join(sized(store.get(key)) for key in request.keys))
            case Op.MULTI_SET:
                for key, value in zip(request.keys, request.values, strict=True):
                    store.set(key, value)
            case _:
                self._answer_rare(request)

    def _answer_rare(self, request: Request) -> None:
        store, write = self._store, self._transport.write
        match request.op:
            case Op.GETNUMKEYS:
                write(i64(len(store)))
            case Op.DELETE:
                write(i64(store.delete(request.keys[0])))
            case Op.CANCEL_WAIT:
                self._forget_wait()
                write(_WAIT_CANCELED)
            case Op.PING:
                write(u32(request.number))
            case Op.QUEUE_PUSH:
                store.push(request.keys[0], request.values[0])
            case Op.QUEUE_POP:
                length, value = store.pop(request.keys[0])
                write(i64(length) + (sized(value) if length else b""))
            case Op.QUEUE_LEN:
                write(i64(store.length(request.keys[0])))
            case Op.LIST_KEYS:
                write(i64(len(store)) + b"".join(map(sized, store.keys())))
            case Op.BARRIER:
                self._wait(store.barrier(request.keys[0], request.number, self._stop_waiting))
            case _:
                raise WireError("out-of-place", f"{request.op.name} has no place here")

    def _wait(self, waiter: Waiter | None) -> None:
        self._forget_wait()
        self._waiter = waiter
        if waiter is None:
            self._transport.write(_STOP_WAITING)

    def _stop_waiting(self) -> None:
        self._waiter = None
        self._transport.write(_STOP_WAITING)

    def _forget_wait(self) -> None:
        if self._waiter is not None:
            self._store.forget(self._waiter)
            self._waiter = None

    # ---- ends

    def _become_link(self, gate: LinkGate, protocol: int) -> None:
        self._let_go()
        task = asyncio.ensure_future(accept(gate, self._transport, protocol, self._reader.rest(), self._server.drop))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _drop(self, reason: str, message: str) -> None:
        peer = self._transport.get_extra_info("peername")
        self._server.drop(reason, f"{peer[0]}:{peer[1]}" if peer else "a client", message)
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def _let_go(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._forget_wait()
        self._server.clients.discard(self)
