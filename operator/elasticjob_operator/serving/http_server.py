"""A small HTTP server for probes and metrics, in a thread of its own: whatever its clients do, it stays small.

A connection is for one request. Each has a few seconds for its request and for its response, and there are at most
CONNECTIONS of them. A further one takes the place of the one that has waited longest for a request, so connections that
send nothing keep no probe away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from elasticjob._runtime.system.sockets.listening_socket import listen_on_all_addresses
from elasticjob_operator.loop_thread import LoopThread

log = logging.getLogger(__name__)

CONNECTIONS = 64
"""Connections of one server at most."""
REQUEST_SECONDS = 5.0
"""Time in seconds that a client has from its connection to the end of its request's headers, TLS included."""
RESPONSE_SECONDS = 10.0
"""Time in seconds for a response, until the client has taken all of it."""
_MAX_HEADERS = 16_384
"""Bytes of a request's headers. A bearer token has one or two thousand."""
_BACKLOG = 128
"""Connections that wait until the server accepts them."""
_ACCEPT_AGAIN_SECONDS = 1.0
"""Seconds until the server accepts again after it could not, for example because too many files were open."""


@dataclass(frozen=True)
class HttpRequest:
    """A GET or HEAD request. The names of its headers are in lower case."""

    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HttpResponse:
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, head: bool) -> bytes:
        """Return the bytes of the response; without its body if `head`."""
        headers = {"Content-Type": "text/plain; charset=utf-8", **self.headers, "Content-Length": str(len(self.body))}
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if head else self.body)


Page = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Certificate:
    """The TLS certificate `tls.crt` and its key `tls.key` of a folder, as a Secret of Kubernetes has them."""

    def __init__(self, folder: Path) -> None:
        """OSError, ssl.SSLError: they cannot be read."""
        self._folder = folder
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded = 0
        self.context()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. A certificate that has been renewed is read again."""
        files = self._folder / "tls.crt", self._folder / "tls.key"
        changed = files[0].stat().st_mtime_ns
        if changed != self._loaded:
            self._context.load_cert_chain(*files)
            self._loaded = changed
        return self._context


class HttpServer:
    """Serves pages on a port until it is closed. `name`: of its thread; `pages`: by path."""

    def __init__(self, name: str, port: int, pages: Mapping[str, Page], certificate: Certificate | None = None) -> None:
        """OSError: the port is in use."""
        self._pages = pages
        self._certificate = certificate
        self._waiting: dict[asyncio.Task[None], None] = {}
        """Connections whose request has not arrived, the oldest first."""
        self._answering: set[asyncio.Task[None]] = set()
        self._socket = listen_on_all_addresses(port, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._thread = LoopThread(name)
        self._thread.begin(self._accept())

    async def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """End all connections and the thread. `last`: what the thread does before it ends."""
        if last is not None:
            await self._thread.run(last)
        await self._thread.close()
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            if len(self._waiting) + len(self._answering) >= CONNECTIONS:
                oldest = next(iter(self._waiting), None)
                if oldest is None:
                    connection.close()
                    continue
                del self._waiting[oldest]
                oldest.cancel()
            task = loop.create_task(self._serve(connection))
            self._waiting[task] = None
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # while many connect, the others have their turn too

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._waiting.pop(task, None)
        self._answering.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request has not been answered", exc_info=error)

    async def _serve(self, connection: socket.socket) -> None:
        """Read one request, answer it and close the connection."""
        # No complete request, TLS has failed, or the client has closed the connection.
        expected = (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError)
        try:
            writer, head = await asyncio.wait_for(self._receive(connection), REQUEST_SECONDS)
            task = asyncio.current_task()
            if task is not None and task in self._waiting:
                del self._waiting[task]
                self._answering.add(task)
            await asyncio.wait_for(self._answer(writer, head), RESPONSE_SECONDS)
        except expected:
            pass
        finally:
            # The transport closes the socket once it notices: asyncio may still wait for a file that is closed here.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    async def _receive(self, connection: socket.socket) -> tuple[asyncio.StreamWriter, bytes]:
        """Return the headers of the request, and a writer for its response."""
        try:
            context = self._certificate.context() if self._certificate is not None else None
        except OSError as error:
            log.error("the certificate cannot be used: %s", error)
            connection.close()
            raise
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=_MAX_HEADERS)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        try:
            transport.set_write_buffer_limits(0)  # `drain` waits until the client has taken all
            return asyncio.StreamWriter(transport, protocol, reader, loop), await reader.readuntil(b"\r\n\r\n")
        except BaseException:
            transport.abort()
            raise

    async def _answer(self, writer: asyncio.StreamWriter, head: bytes) -> None:
        try:
            writer.write(await self._response(head))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _response(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        target, _, version = rest.rpartition(" ")
        if not (target.startswith("/") and version.startswith("HTTP/1.")):
            return HttpResponse(b"not a request of HTTP/1.1\n", 400).encode(head=False)
        if method not in ("GET", "HEAD"):
            return HttpResponse(b"only GET and HEAD\n", 405, {"Allow": "GET, HEAD"}).encode(head=False)
        path, _, query = target.partition("?")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        page = self._pages.get(path)
        found = HttpResponse(b"not found\n", 404)
        if page is not None:
            try:
                found = await page(HttpRequest(path, query, headers))
            except Exception:  # it is the request's, and the next one may do better
                log.exception("the page %s fails", path)
                found = HttpResponse(b"an error of the operator: see its log\n", 500)
        return found.encode(head=method == "HEAD")


async def ask_loop(
    loop: asyncio.AbstractEventLoop, question: Callable[[], HttpResponse], seconds: float
) -> HttpResponse:
    """Return what `question` answers when it is called in another thread's loop; 503 if that takes longer."""

    async def ask() -> HttpResponse:
        return question()

    try:
        return await asyncio.wait_for(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), loop)), seconds)
    except asyncio.TimeoutError:
        return HttpResponse(f"the event loop has not answered for {seconds:.0f} s\n".encode(), 503)
