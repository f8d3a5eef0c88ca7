"""`KubeApi` over `kubernetes.aio`: only its authentication, TLS and transport are used, not its models."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import getproxies_environment

import aiohttp
from aiohttp.http import HttpProcessingError
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException

from elasticjob_operator import metrics
from elasticjob_operator.kube.api import Page, Resource
from elasticjob_operator.kube.errors import KubeError, Unclear, error_from
from elasticjob_operator.kube.limits import ConcurrencyLimit, Limit, LowPriorityLimit, RateLimit
from elasticjob_operator.model.cluster.raw import mapping
from elasticjob_operator.version import VERSION

ATTEMPTS = 4
PAGE = 200
"""Objects in one response to a list at most. While Python parses one, no other thread runs, as that of the Lease."""
LARGE_PAGE = 16 * 2**20
"""Bytes of a response to a list after which the next ones of its resource are to have fewer objects. Parsed, they take
some three times as much memory."""
_PAGE_GROWTH = 10
"""Objects by which the next response is larger after a full one that has less than half of LARGE_PAGE."""
TIMEOUT = 15.0
"""Seconds of one attempt, where a client has no other."""
LONGEST_WAIT = 10.0
"""Seconds between two attempts, before jitter."""
WATCH_SECONDS = 600
"""Longest time in seconds after which the API server ends a watch."""
SILENT_WATCH_SECONDS = 180.0
"""Seconds without a byte after which a watch is taken for lost, such as one whose connection a firewall has forgotten.
The API server sends a bookmark about every minute."""
FIELD_MANAGER = "elasticjob-operator"
"""Name of the operator in `managedFields` of all that it writes."""
USER_AGENT = f"{FIELD_MANAGER}/{VERSION}"
"""How the API server's audit log, metrics and flow schemas name the operator."""
_HOME_CONFIG = str(Path("~/.kube/config").expanduser())
_MERGE_PATCH = "application/merge-patch+json"
CONNECTIONS = 32
"""Connections to the API server at most. asyncio keeps a buffer of 256 KiB for each TLS connection, and a request takes
some 10 ms: the rate limit is reached with a few."""
AT_ONCE = 24
"""Requests under way at most, apart from watches: an API server that takes 0.2 s for each reaches the rate limit."""
LARGEST_EVENT = 2**25
"""Bytes of one event of a watch at most. etcd takes an object of 1.5 MiB, or of some 3 MiB where that is raised, and
the escapes of JSON make text up to six times longer: the API server writes `<` as `\\u003c`. An event above it would
end the watch each time, and with it the view of all tenants' pods."""
_NO_RESPONSE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class NoCluster(Exception):  # noqa: N818
    """The process has neither a kubeconfig nor a service account."""


async def connect_cluster(*, rate: float, burst: int) -> KubeClient:
    """Return a client for $KUBECONFIG, this pod's service account or ~/.kube/config; NoCluster without any of them."""
    configuration = client.Configuration()
    path = os.environ.get("KUBECONFIG")
    try:
        if path is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(config_file=path or _HOME_CONFIG, client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise NoCluster(str(error)) from None
    configuration.connection_pool_maxsize = CONNECTIONS
    # Only for a proxy: aiohttp also looks for a netrc file then, in another thread and for each request, which takes
    # more processor time than the rest of a request.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment().keys() - {"no"})}
    return KubeClient(client.ApiClient(configuration), RateLimit(rate, burst))


class KubeClient:
    """Implements `KubeApi`, with retries.

    Requests are safe to repeat: names follow from the job's state, and writes carry a resourceVersion or a UID.
    `limit` None: the rate is not limited. `timeout`: seconds of one attempt. `under_way`: the limit of a client over
    the same connections; None: an own one.
    """

    def __init__(
        self,
        api: Any,
        limit: Limit | None,
        *,
        timeout: float = TIMEOUT,
        attempts: int = ATTEMPTS,
        under_way: ConcurrencyLimit | None = None,
    ) -> None:
        self.api = api
        self.limit = limit
        self._timeout = timeout
        self._attempts = attempts
        self._page_sizes: dict[Resource, int] = {}
        """Objects in the next response to a list, where that is not PAGE."""
        self._streams: Any = None
        """The client of watches, once there is one: they need a connection each, for as long as they last."""
        self._under_way = ConcurrencyLimit(AT_ONCE) if under_way is None else under_way
        self.last_success = asyncio.get_running_loop().time()
        """Time of the last successful response, on the event loop's clock."""
        self.may_write: Callable[[], bool] = lambda: True
        """Returns whether requests that change something may be sent; else they raise a KubeError."""

    def separate(self, *, timeout: float) -> KubeClient:
        """Return a client with connections of its own, without rate limit and retries: no other request delays its
        requests. `timeout`: seconds of one request."""
        return KubeClient(client.ApiClient(self.api.configuration), None, timeout=timeout, attempts=1)

    def background(self) -> KubeClient:
        """Return a client over the same connections, for requests that take only what others leave of the limit."""
        limit = LowPriorityLimit(self.limit) if isinstance(self.limit, RateLimit) else self.limit
        return KubeClient(self.api, limit, timeout=self._timeout, attempts=self._attempts, under_way=self._under_way)

    async def close(self) -> None:
        await self.api.close()
        if self._streams is not None:
            await self._streams.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any]:
        return await self._request("GET", resource, namespace, name)

    async def list(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[dict[str, Any]]:
        return [item async for page in self.pages(resource, namespace, selector, fields) for item in page.items]

    async def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        selectors = {"labelSelector": selector, "fieldSelector": fields}
        query = {"limit": str(PAGE)} | {name: value for name, value in selectors.items() if value}
        while True:
            size = self._page_sizes.get(resource, PAGE)
            query["limit"] = str(size)
            received: list[int] = []
            answer = await self._request("GET", resource, namespace, query=query, verb="list", on_size=received.append)
            items = answer.get("items") or []
            self._page_sizes[resource] = _next_page_size(size, len(items), sum(received))
            yield Page(items, mapping(answer, "metadata").get("resourceVersion") or "")
            query["continue"] = mapping(answer, "metadata").get("continue") or ""
            if not query["continue"]:
                return

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request("POST", resource, namespace, body=body)

    async def update(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        return await self._request("PUT", resource, namespace, body["metadata"]["name"], subresource, body=body)

    async def patch(self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request("PATCH", resource, namespace, name, body=body)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, grace: int | None = None
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        return await self._request("DELETE", resource, namespace, name, body=options)

    @asynccontextmanager
    async def watch(
        self, resource: Resource, namespace: str | None, version: str, selector: str = ""
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Open a watch from this resourceVersion on; the value is its events. KubeError: it cannot be opened.

        The events end after WATCH_SECONDS at most, where the connection ends, and where no byte has arrived for
        SILENT_WATCH_SECONDS. KubeError: an event is not a JSON object, or too large.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            # Between half and all of it, so that the watches of many namespaces are not opened again all at once.
            "timeoutSeconds": str(random.randint(WATCH_SECONDS // 2, WATCH_SECONDS)),  # noqa: S311  # no secret
            "resourceVersion": version,
        } | ({"labelSelector": selector} if selector else {})
        what = f"watch {resource.plural}"
        if self.limit is not None:
            await self.limit.acquire()
        if self._streams is None:
            self._streams = _unlimited(self.api)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=SILENT_WATCH_SECONDS)
        path = f"{quote(resource.path(namespace))}?{urlencode(query)}"
        try:
            response = await self._send("GET", path, None, timeout, self._streams)
        except _NO_RESPONSE as error:
            metrics.api_requests.labels("watch", resource.plural, "0").inc()
            raise Unclear(f"{what}: {type(error).__name__}: {error}") from None
        try:
            metrics.api_requests.labels("watch", resource.plural, str(response.status)).inc()
            if response.status != 200:
                raise error_from(response.status, await _body(response), what)
            self.last_success = asyncio.get_running_loop().time()
            yield _events(response, what)
        finally:
            response.response.close()

    async def _request(
        self,
        method: str,
        resource: Resource,
        namespace: str | None,
        name: str = "",
        subresource: str = "",
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        verb: str = "",
        on_size: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Send a request, again where that may help; return the answer. KubeError: it failed.

        `on_size`: called with the bytes of the answer.
        """
        if method in _MANAGED:
            query = {**(query or {}), "fieldManager": FIELD_MANAGER}
        path = quote(resource.path(namespace, name, subresource)) + (f"?{urlencode(query)}" if query else "")
        what = f"{verb or _VERBS[method]} {resource.plural} {name}".strip()
        for attempt in range(1, self._attempts + 1):
            if self.limit is not None:
                await self.limit.acquire(namespace or "")
            async with self._under_way.hold(namespace or ""):
                if method != "GET" and not self.may_write():
                    raise KubeError(f"{what}: not sent, because another operator may lead")
                status, answer, received, retry_after = await self._once(method, path, body)
            metrics.api_requests.labels(verb or _VERBS[method], resource.plural, str(status)).inc()
            if 200 <= status < 300:
                self.last_success = asyncio.get_running_loop().time()
                on_size(received)
                return answer
            if attempt == self._attempts or not (status in (0, 408, 429) or status >= 500):
                break
            await asyncio.sleep(retry_delay(attempt, retry_after))
        if status == 0:
            raise Unclear(f"{what}: {answer.get('message', 'no response')}")
        raise error_from(status, answer, what)

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, Any], int, float]:
        """Send one request; return the HTTP status (0: no response, or a success without a JSON object), the JSON
        response, its bytes, and Retry-After in seconds."""
        try:
            response = await self._send(method, path, body, self._timeout)
            data = await response.read()
        except _NO_RESPONSE as error:
            return 0, {"message": f"{type(error).__name__}: {error}"}, 0, 0.0
        status, retry_after = response.status, _seconds(response.headers.get("Retry-After"))
        if not 200 <= status < 300:
            return status, _error_answer(data), len(data), retry_after
        try:
            return status, _json_object(data), len(data), retry_after
        except ValueError as error:  # a proxy may have answered; an empty list instead would drop all objects
            return 0, {"message": f"HTTP {status}, but the answer cannot be read: {error}"}, len(data), retry_after

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float | aiohttp.ClientTimeout,
        api: Any = None,
    ) -> Any:
        """Send one request; return the response, whose content is not read yet."""
        api = api or self.api
        content = _MERGE_PATCH if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": content}
        _, url, headers, _, _ = await api.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        headers["User-Agent"] = USER_AGENT
        return await api.rest_client.request(method, url, headers=headers, body=body, _request_timeout=timeout)


_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_MANAGED = ("POST", "PUT", "PATCH")
"""Methods that write fields, each of which has a manager."""


def _unlimited(api: Any) -> Any:
    """Return a client with the same credentials, and any number of connections."""
    configuration = copy.copy(api.configuration)
    configuration.connection_pool_maxsize = 0
    session = configuration.client_session_kwargs or {}
    # aiohttp takes lines of up to twice its buffer.
    configuration.client_session_kwargs = {**session, "read_bufsize": LARGEST_EVENT // 2}
    return client.ApiClient(configuration)


async def _body(response: Any) -> dict[str, Any]:
    try:
        return _error_answer(await response.read())
    except _NO_RESPONSE:
        return {}


async def _events(response: Any, what: str) -> AsyncIterator[dict[str, Any]]:
    try:
        async for line in response.response.content:
            if not line.endswith(b"\n"):
                return  # the connection has ended within it
            yield _json_object(line)
    except _NO_RESPONSE:
        return
    except (ValueError, HttpProcessingError) as error:  # no JSON, or too large
        raise KubeError(f"{what}: an event cannot be read: {error}", 413) from None


def _next_page_size(size: int, count: int, received: int) -> int:
    """Return how many objects the next response to a list may have, after one with `count` of at most `size` objects
    and this many bytes."""
    if received > LARGE_PAGE:
        return max(1, min(size // 2, count * LARGE_PAGE // received))
    # A response that is not full says nothing of those that are.
    return min(PAGE, size + _PAGE_GROWTH) if count >= size and received < LARGE_PAGE // 2 else size


def _json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in these bytes; ValueError, with the begin of the text: there is none."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ValueError(_begin(data))
    return answer


def _error_answer(data: bytes) -> dict[str, Any]:
    """Return the metav1.Status of an error; where a proxy has answered, the begin of its text as the message."""
    try:
        return _json_object(data)
    except ValueError:
        return {"message": _begin(data)}


def _begin(data: bytes) -> str:
    return data[:200].decode(errors="replace").strip()


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isascii() and text.isdigit() else 0.0


def retry_delay(attempt: int, retry_after: float) -> float:
    """Return Retry-After, else a delay that doubles from 0.2 s; with jitter, so that clients do not retry together."""
    base: float = retry_after or 0.1 * 2**attempt
    return min(LONGEST_WAIT, base) * random.uniform(0.8, 1.2)  # noqa: S311  # no secret
