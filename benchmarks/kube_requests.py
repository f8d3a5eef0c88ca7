"""Requests to an API server from asyncio: raw JSON, as the administrator."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp

from benchmarks.api_server import ApiServer

Json = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
CONNECTIONS = 32
LONGEST_LINE = 16 * 2**20
"""Bytes of one watch event."""
WATCH_SECONDS = 600
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class RequestRefusedError(Exception):
    """The API server refused a request. `status`: HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class KubeRequests:
    """An asynchronous context manager, with connections of its own."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    async def __aenter__(self) -> KubeRequests:
        tls = ssl.create_default_context(cafile=str(self._server.pki / "ca.crt"))
        tls.load_cert_chain(self._server.pki / "admin.crt", self._server.pki / "admin.key")
        connector = aiohttp.TCPConnector(ssl=tls, limit=CONNECTIONS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Json | None = None, content: str = "application/json") -> str:
        """Send one request and return the response's text. RequestRefusedError; aiohttp.ClientError: no response."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content, "Accept": "application/json"}
        async with self._session.request(method, self._server.url + path, data=data, headers=headers) as response:
            text = await response.text()
            if response.status >= 400:
                raise RequestRefusedError(response.status, text[:300])
            return text

    async def get(self, path: str) -> Json:
        found: Json = json.loads(await self.request("GET", path))
        return found

    async def watch(self, path: str, selector: str = "") -> AsyncIterator[tuple[str, Json]]:
        """Yield (type, object) for the objects that exist, then for each change, for ever.

        The API server ends a watch whose client is slow: it goes on after the last event. RequestRefusedError: it
        cannot, because the API server does not have the next event any more.
        """
        query = {"watch": "1", "timeoutSeconds": str(WATCH_SECONDS), "labelSelector": selector}
        while True:
            async with self._session.get(self._server.url + path, params=query, read_bufsize=LONGEST_LINE) as response:
                if response.status >= 400:
                    raise RequestRefusedError(response.status, await response.text())
                async for line in response.content:
                    event = json.loads(line)
                    found: Json = event["object"]
                    if event["type"] == "ERROR":
                        raise RequestRefusedError(int(found.get("code", 0)), str(found.get("message")))
                    query["resourceVersion"] = found["metadata"]["resourceVersion"]
                    yield event["type"], found

    async def define(self, definition: Json, path: str) -> None:
        """Create a CustomResourceDefinition, and wait until the API server serves `path`."""
        await self.request("POST", DEFINITIONS, definition)
        await self.until_answered(path)

    async def create_namespace(self, name: str) -> None:
        """Create a namespace, with the ServiceAccount that pods need."""
        await self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        account = {"metadata": {"name": "default", "namespace": name}}
        await self.request("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)

    async def until_answered(self, path: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(RequestRefusedError, aiohttp.ClientConnectionError):
                await self.get(path)
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the API server does not answer {path}")
