"""An operator as a process of its own, in virtual time, for tests that kill it or break its connections.

Work queue, controller, watch cache and API client are the product's. The client's HTTP requests go to an API server in
memory, where each write can meet a fault.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast
from urllib.parse import parse_qs

from elasticjob_operator.kube import EVENTS, JOBS, PODS, KubeError, Resource
from elasticjob_operator.kube import api as kube_api
from elasticjob_operator.kube.client import ATTEMPTS, KubeClient
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.queue.workqueue import WorkQueue
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.watch import Watch
from support.operator.world import Api, FakeStoreLinks, World

Raw = dict[str, Any]

KEY = ("ns", "bert")
RESOURCES = tuple(kind for kind in vars(kube_api).values() if isinstance(kind, Resource))
"""All that the operator uses."""
_BY_PATH = {resource.path(): resource for resource in RESOURCES}


# ---- time ------------------------------------------------------------------------------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on the API server's clock, which jumps to the next timer whenever nothing else is left to run."""

    def __init__(self, api: Api) -> None:
        self._api = api
        super().__init__(_Selector(api))

    def time(self) -> float:
        return self._api.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, api: Api) -> None:
        super().__init__()
        self._api = api

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits for something that never happens"
            self._api.now += max(1e-6, timeout)  # a timer fires once its time is past
        return ready


def run_virtual(api: Api, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in virtual time. The delays with jitter are the same in each run."""
    random.seed(0)
    loop = VirtualLoop(api)
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


# ---- the API server --------------------------------------------------------------------------------------------


class Fault(Enum):
    """What happens at a write of the operator."""

    KILL_BEFORE = "the operator is killed before it"
    KILL_AFTER = "the operator is killed after it, before the answer"
    ANSWER_LOST = "its connection breaks before the answer"
    DELETED = "a user deletes the job before it"
    DELETED_AND_KILLED = "a user deletes the job and the operator is killed before it"
    REFUSED = "from it on nothing listens at the API server's port, for ten minutes"
    SILENT = "from it on the API server does not answer, for ten minutes"
    THROTTLED = "from it on the API server answers 429, for a minute"
    BROKEN = "from it on the API server answers 500, for a minute"
    THROTTLED_AT_TIMES = "from it on every second request fails with 429 in spite of its retries, for a minute"
    BROKEN_AT_TIMES = "from it on every second request fails with 500 in spite of its retries, for a minute"


OUTAGES = {
    Fault.REFUSED: 600.0, Fault.SILENT: 600.0,
    Fault.THROTTLED: 60.0, Fault.BROKEN: 60.0, Fault.THROTTLED_AT_TIMES: 60.0, Fault.BROKEN_AT_TIMES: 60.0,
}  # fmt: skip
"""Faults that last, with their seconds."""
_ERRORS = {
    Fault.THROTTLED: 429, Fault.THROTTLED_AT_TIMES: 429, Fault.BROKEN: 500, Fault.BROKEN_AT_TIMES: 500,
}  # fmt: skip


@dataclass(frozen=True)
class Response:
    """What the client reads of an HTTP response."""

    status: int
    body: Raw
    headers: Mapping[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass
class ApiServer:
    """`Api` behind HTTP. The write of number `fault_at`, from 0, meets the fault."""

    api: Api
    fault: Fault | None = None
    fault_at: int = 0
    writes: list[str] = field(default_factory=list)
    """All writes that the operator sent or was about to send."""
    created: list[tuple[str, str]] = field(default_factory=list)
    """The UID of the owner and the name of each pod that was created."""
    applied: list[tuple[str, str, str]] = field(default_factory=list)
    """Writes that changed something: verb, plural, name."""
    outage_until: float = 0.0
    _tries: Counter[str] = field(default_factory=Counter)
    """How often each request was sent during an outage."""

    @property
    def outage(self) -> Fault | None:
        """The fault that lasts now."""
        return self.fault if self.api.now < self.outage_until else None

    @property
    def reachable(self) -> bool:
        """Whether kubelets, the scheduler and watches reach the API server."""
        return self.outage not in (Fault.REFUSED, Fault.SILENT)

    def begin(self, method: str, url: str, body: Raw | None) -> Fault | None:
        """Record a request if it is a write, and return the fault that it meets."""
        if method == "GET":
            return None
        fault = self.fault if len(self.writes) == self.fault_at else None
        created = f"/{body['metadata']['name']}" if method == "POST" and body else ""
        self.writes.append(f"{method} {url}{created}")
        if fault is not None and fault in OUTAGES:
            self.outage_until = self.api.now + OUTAGES[fault]
        if fault in (Fault.DELETED, Fault.DELETED_AND_KILLED):
            self.api.remove(JOBS, KEY[1])
        return fault

    def error(self, method: str, url: str) -> Response | None:
        """Return the error with which the API server answers this request now; None if it carries the request out."""
        if self.outage not in _ERRORS:
            return None
        self._tries[f"{method} {url}"] += 1
        at_times = self.outage in (Fault.THROTTLED_AT_TIMES, Fault.BROKEN_AT_TIMES)
        if at_times and self._tries[f"{method} {url}"] % (ATTEMPTS + 1) == 0:
            return None
        status = _ERRORS[self.outage]
        return Response(status, {"message": f"HTTP {status}"}, {"Retry-After": "1"} if status == 429 else {})

    async def respond(self, method: str, url: str, body: Raw | None) -> Response:
        """Carry out a request."""
        path, _, query = url.partition("?")
        words = path.split("/")[1:]
        if "namespaces" in words:
            at = words.index("namespaces")
            del words[at : at + 2]
        root = 3 if words[0] == "api" else 4
        resource = _BY_PATH["/" + "/".join(words[:root])]
        name, subresource = (*words[root:], "", "")[:2]
        try:
            answer = await self._call(method, resource, name, subresource, query, body or {})
        except KubeError as error:
            return Response(error.status, {"reason": type(error).__name__, "message": str(error)})
        if method != "GET" and resource is not EVENTS:
            self.applied.append((method, resource.plural, name or answer["metadata"]["name"]))
            if method == "POST" and resource is PODS:
                meta = answer["metadata"]
                self.created.append((meta["ownerReferences"][0]["uid"], meta["name"]))
        return Response(200, answer)

    async def _call(self, method: str, resource: Resource, name: str, subresource: str, query: str, body: Raw) -> Raw:
        match method:
            case "GET" if name:
                return await self.api.get(resource, None, name)
            case "GET":
                (selector,) = parse_qs(query).get("labelSelector", [""])
                return {"items": await self.api.list(resource, None, selector)}
            case "POST":
                return await self.api.create(resource, "", body)
            case "PUT":
                return await self.api.update(resource, "", body, subresource)
            case "PATCH":
                return await self.api.patch(resource, "", name, body)
            case "DELETE":
                uid, grace = body["preconditions"]["uid"], body.get("gracePeriodSeconds")
                return await self.api.delete(resource, "", name, uid=uid, grace=grace)
        raise AssertionError(f"a request that the operator does not send: {method}")


class Connection:
    """The connection of one operator process to the API server, in place of kubernetes.aio's ApiClient."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self.killed = False
        self.rest_client = self

    async def param_serialize(self, method: str, path: str, **_: Any) -> tuple[str, str, Raw, None, None]:
        return method, path, {}, None, None

    async def request(
        self, method: str, url: str, *, headers: Any, body: Raw | None, _request_timeout: float
    ) -> Response:
        if self.killed:
            await _never()
        fault = self._server.begin(method, url, body)
        if fault in (Fault.KILL_BEFORE, Fault.DELETED_AND_KILLED):
            await self._kill()
        if self._server.outage is Fault.REFUSED:
            raise ConnectionRefusedError("connection refused")
        if self._server.outage is Fault.SILENT:
            await asyncio.sleep(_request_timeout)
            raise asyncio.TimeoutError
        response = self._server.error(method, url) or await self._server.respond(method, url, body)
        if fault is Fault.KILL_AFTER:
            await self._kill()
        if fault is Fault.ANSWER_LOST:
            raise ConnectionResetError("connection reset by peer")
        return response

    async def _kill(self) -> None:
        self.killed = True
        await _never()


async def _never() -> None:
    """A killed process does not go on: the test cancels its tasks later."""
    await asyncio.get_running_loop().create_future()


# ---- the process -----------------------------------------------------------------------------------------------


class OperatorProcess:
    """One life of the operator, without any earlier state. Its watches deliver each event `lag` seconds late."""

    def __init__(self, server: ApiServer, world: World, lag: float = 0.0) -> None:
        api, loop = server.api, asyncio.get_running_loop()
        self.connection = Connection(server)
        self._lag = lag
        self.links = FakeStoreLinks(api, world.stores, since=api.now)
        self._reported: object = None
        client, links = KubeClient(self.connection, None), cast(Any, self.links)

        async def reconcile(key: JobKey) -> float | None:
            return await controller.reconcile(key)

        self.queue: WorkQueue[JobKey] = WorkQueue(reconcile, loop.time)
        watched = WatchCache(self.queue.enqueue, nodes_watched=False if world.warnings is None else None)
        recorder = Recorder(client, "me")
        controller = Controller(client, JobKeys(b"k" * 32), links, recorder, "image", clock=loop.time, watched=watched)
        self.watch = Watch(api, watched)
        self._world = world
        self.deliver(lag=0.0)  # what a watch lists first
        self._task = loop.create_task(self.queue.run(2))
        self._events = loop.create_task(recorder.run())

    def deliver(self, lag: float | None = None) -> None:
        """Deliver watch events."""
        self.watch.record()
        self.watch.deliver(age=self._lag if lag is None else lag)
        if self._world.warnings is not None:
            for node in self._world.nodes:
                self.watch.cache.see_node(node, self._world.warnings.get(node))
            self.watch.cache.set_nodes_watched(True)

    def report(self) -> None:
        """Deliver the reports of stores."""
        # Without an address, the view of a link changes with time only.
        standby = self.links.standby_view(KEY) if self.links.standby_address else None
        reported = self.links.view(KEY), standby
        if reported != self._reported:
            self._reported = reported
            self.queue.enqueue(KEY)

    def check(self) -> None:
        """Fail if the process has ended by itself."""
        if self._task.done():
            self._task.result()
            raise AssertionError("the work queue ended")

    async def stop(self) -> None:
        for task in (self._task, self._events):
            task.cancel()
        await asyncio.gather(self._task, self._events, return_exceptions=True)
