"""A proxy before an API server, which can end all connections and answer requests with an error."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

_HEADERS = ("Authorization", "Accept", "Content-Type")


class ApiProxy:
    """Forwards requests as they are, without TLS on this side."""

    def __init__(self, session: aiohttp.ClientSession, target: str) -> None:
        self._session = session
        self._target = target
        self._streams: set[asyncio.Task[object]] = set()
        self.url = ""
        self.errors: dict[str, int] = {}
        """HTTP statuses of the responses to requests whose path ends so."""

    def cut(self) -> None:
        """End all requests that run, watches above all."""
        for stream in self._streams:
            stream.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one request."""
        status = next((status for end, status in self.errors.items() if request.path.endswith(end)), None)
        if status is not None:
            return web.json_response({"message": "an error of the proxy", "code": status}, status=status)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        try:
            body = await request.read()
            async with self._session.request(
                request.method, self._target + request.path_qs, data=body or None, headers=headers
            ) as found:
                response = web.StreamResponse(status=found.status, headers={"Content-Type": found.content_type})
                await response.prepare(request)
                async for chunk in found.content.iter_any():
                    await response.write(chunk)
                return response
        finally:
            self._streams.discard(task)


@asynccontextmanager
async def api_proxy(target: str, authority: Path) -> AsyncIterator[ApiProxy]:
    """Serve a proxy on a free port. `authority`: the certificate that the API server's is signed with."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(authority)), limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        proxy = ApiProxy(session, target)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{tail:.*}", proxy.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            await runner.cleanup()
