"""The HTTP server of the page: on 127.0.0.1 only, read only, and only for who knows the token.

Other users of the machine can connect, and so can each page that a browser shows. The token in the path keeps both out.
The check of the Host header keeps out a page whose name was made to resolve to 127.0.0.1, even with a leaked token.
"""

from __future__ import annotations

import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, ClassVar

from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.ui.feed import BusyError, JobFeed

MOST_CONNECTIONS = 32
"""Connections at the same time; the next one is closed."""
REQUEST_SECONDS = 10.0
"""Seconds in which a connection must have sent its request."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGE = "index.html"


class PageServer(ThreadingHTTPServer):
    """Serves the page, and the data of a feed as JSON, below `/TOKEN/`. Port 0: a free one. OSError: it is taken."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, feed: JobFeed, token: str, port: int = 0) -> None:
        self.feed = feed
        self.token = token
        self.files = _page_files()
        self._unanswered: dict[socket.socket, float] = {}
        """Since when a connection has not sent its request."""
        self._connections = 0
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _PageRequest)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """Values of the Host header that a browser sends for this page."""
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for the name of the machine, which may take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that `--port` works again at once
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = self._connections >= MOST_CONNECTIONS
            if not full:
                self._connections += 1
                self._unanswered[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections -= 1
                self._unanswered.pop(request, None)

    def note_request(self, connection: socket.socket) -> None:
        """Note that a connection has sent its request."""
        with self._lock:
            self._unanswered.pop(connection, None)

    def service_actions(self) -> None:
        """End connections that send nothing, or a byte from time to time."""
        oldest = time.monotonic() - REQUEST_SECONDS
        with self._lock:
            late = [connection for connection, since in self._unanswered.items() if since < oldest]
            for connection in late:
                del self._unanswered[connection]
        for connection in late:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # its thread has ended it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of ours; a browser that closes a connection is none."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _PageRequest(BaseHTTPRequestHandler):
    """One request; the connection ends with its answer."""

    server: PageServer
    timeout = REQUEST_SECONDS
    _reads: ClassVar = ("GET", "HEAD")

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _answer(self) -> None:
        self.server.note_request(self.connection)
        own = self.headers.get_all("Host") or []
        if len(own) != 1 or own[0] not in self.server.hosts:
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        token, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)  # no request of the page has a body
            return
        self._route(path.split("/"))

    def _route(self, parts: list[str]) -> None:
        reads, feed = self.command in self._reads, self.server.feed
        match parts:
            case [name] if reads and (name or _PAGE) in self.server.files:
                name = name or _PAGE
                self._send(HTTPStatus.OK, self.server.files[name], _TYPES[name.rpartition(".")[2]])
            case ["api", "jobs"] if reads:
                self._send_view(feed.jobs)
            case ["api", "jobs", namespace, job] if reads:
                self._send_view(lambda: feed.job(namespace, job))
            case ["api", "jobs", namespace, job, "stacks"] if not reads and self._is_from_page():
                self._send_view(lambda: feed.stacks(namespace, job))
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _is_from_page(self) -> bool:
        """Return whether our page sends a request that interrupts workers for a moment, and no link to it."""
        return self.headers.get("Origin", "") in {f"http://{host}" for host in self.server.hosts}

    def _send_view(self, read: Any) -> None:
        try:
            view: Mapping[str, Any] = read()
            status = HTTPStatus.OK
        except BusyError as error:
            view, status = {"error": str(error)}, HTTPStatus.GATEWAY_TIMEOUT
        except ClusterError as error:
            missing = isinstance(error, RefusedError) and error.not_found
            view, status = {"error": str(error)}, HTTPStatus.NOT_FOUND if missing else HTTPStatus.BAD_GATEWAY
        except Exception as error:  # the page shows it: this process has no other reader
            view, status = {"error": f"{type(error).__name__}: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR
        self._send(status, json.dumps(view, ensure_ascii=False).encode(errors="replace"), "application/json")

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(status, f"{status.phrase}\n".encode(), "text/plain")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is no HTTP, or of another method, without the text that it sent."""
        self._refuse(HTTPStatus(code))

    def _send(self, status: HTTPStatus, body: bytes, content: str) -> None:
        self.send_response_only(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing: the terminal has the address, and lines would hide it."""


def _page_files() -> dict[str, bytes]:
    folder = resources.files("elasticjob.cli.ui").joinpath("page")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}
