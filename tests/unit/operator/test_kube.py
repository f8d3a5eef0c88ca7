"""The API client: paths, errors, retries and the rate limit, against an HTTP server on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp import web
from kubernetes.aio import client

from elasticjob_operator.__main__ import Operator
from elasticjob_operator.kube import (
    EVENTS,
    JOBS,
    LEASES,
    PODS,
    AlreadyExists,
    Conflict,
    KubeError,
    NotFound,
    Refused,
    Resource,
    Throttled,
    Unclear,
)
from elasticjob_operator.kube import client as kube_client
from elasticjob_operator.kube.client import KubeClient, connect_cluster
from elasticjob_operator.kube.errors import error_from
from elasticjob_operator.kube.limits import RateLimit
from elasticjob_operator.lease import REQUEST_TIMEOUT
from elasticjob_operator.loop_thread import LoopThread
from elasticjob_operator.settings import OperatorSettings
from elasticjob_operator.version import VERSION


class Server:
    """Sends responses from a list, else an empty 200, and records the requests."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any, dict[str, str]]] = []
        self.raw_bodies: list[str] = []
        """What responses with status 200 contain, before those of `answers`."""
        self.requests: list[tuple[str, str, str, Any]] = []
        self.agents: set[str] = set()
        """The User-Agent of each request."""
        self.hang = False
        """Whether requests that arrive now get no answer until the server stops."""
        self.hung = asyncio.Semaphore(0)
        """One permit for each of these requests."""
        self.stopped = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.text()
        path = request.path_qs
        self.agents.add(request.headers.get("User-Agent", ""))
        self.requests.append((request.method, path, request.content_type, json.loads(body) if body else None))
        if self.hang:
            self.hung.release()
            await self.stopped.wait()
        if self.raw_bodies:
            return web.Response(text=self.raw_bodies.pop(0))
        status, answer, headers = self.answers.pop(0) if self.answers else (200, {}, {})
        return web.json_response(answer, status=status, headers=headers)

    def respond(self, status: int, answer: Any = None, **headers: str) -> None:
        self.answers.append((status, answer or {}, {k.replace("_", "-"): v for k, v in headers.items()}))


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, KubeClient]]:
    monkeypatch.setattr(kube_client, "retry_delay", lambda attempt, retry_after: 0.0)
    fake = Server()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    api = KubeClient(client.ApiClient(configuration), RateLimit(1000, 1000))
    yield fake, api
    fake.stopped.set()
    await api.close()
    await runner.cleanup()


Pair = tuple[Server, KubeClient]


async def test_requests_have_path_content_type_and_body_of_the_api(server: Pair) -> None:
    fake, api = server
    fake.respond(200, {"metadata": {"continue": "next"}, "items": [{"a": 1}]})
    fake.respond(200, {"items": [{"a": 2}]})
    assert await api.list(PODS, "ns", "a=b") == [{"a": 1}, {"a": 2}]
    await api.update(JOBS, "ns", {"metadata": {"name": "j"}}, "status")
    await api.patch(PODS, "ns", "p", {"x": 1})
    await api.delete(PODS, "ns", "p", uid="u", grace=0)
    await api.create(LEASES, "ns", {"metadata": {"name": "l"}})
    await api.get(PODS, "ns", "p")
    assert fake.requests == [
        ("GET", "/api/v1/namespaces/ns/pods?limit=200&labelSelector=a%3Db", "application/json", None),
        ("GET", "/api/v1/namespaces/ns/pods?limit=200&labelSelector=a%3Db&continue=next", "application/json", None),
        (
            "PUT", "/apis/elasticjob.dev/v1alpha1/namespaces/ns/elasticjobs/j/status?fieldManager=elasticjob-operator",
            "application/json", {"metadata": {"name": "j"}},
        ),
        (
            "PATCH", "/api/v1/namespaces/ns/pods/p?fieldManager=elasticjob-operator", "application/merge-patch+json",
            {"x": 1},
        ),
        (
            "DELETE", "/api/v1/namespaces/ns/pods/p", "application/json",
            {"preconditions": {"uid": "u"}, "propagationPolicy": "Background", "gracePeriodSeconds": 0},
        ),
        (
            "POST", "/apis/coordination.k8s.io/v1/namespaces/ns/leases?fieldManager=elasticjob-operator",
            "application/json", {"metadata": {"name": "l"}},
        ),
        ("GET", "/api/v1/namespaces/ns/pods/p", "application/json", None),
    ]  # fmt: skip
    assert fake.agents == {f"elasticjob-operator/{VERSION}"}


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (404, {"message": "not found"}, NotFound),
        (409, {"reason": "AlreadyExists"}, AlreadyExists),
        (409, {"reason": "Conflict"}, Conflict),
        (403, {"message": "exceeded quota: q"}, Refused),
        (422, {}, Refused),
        (401, {}, Refused),
        (429, {}, Throttled),
        (408, {}, Unclear),
        (500, {}, Unclear),
    ],
)
def test_errors(status: int, answer: dict[str, Any], kind: type[KubeError]) -> None:
    error = error_from(status, answer, "create pods p")
    assert type(error) is kind
    assert str(error).startswith("create pods p: ")
    assert isinstance(error, Refused) is (kind is Refused)
    assert not isinstance(error, Refused) or error.quota is ("quota" in str(error))


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_transient_errors_are_retried(server: Pair, status: int) -> None:
    fake, api = server
    fake.respond(status, Retry_After="1")
    fake.respond(200, {"ok": True})
    assert await api.get(PODS, "ns", "p") == {"ok": True}


@pytest.mark.parametrize("body", ["<html>maintenance</html>", "[]", "null", "", "[" * 100_000])
async def test_a_success_without_a_json_object_is_no_answer(server: Pair, body: str) -> None:
    """As an empty list, it would drop all that the operator knows."""
    fake, api = server
    fake.raw_bodies = [body]
    fake.respond(200, {"items": [{"a": 1}]})
    assert await api.list(PODS, None) == [{"a": 1}]
    fake.raw_bodies = [body] * kube_client.ATTEMPTS
    with pytest.raises(Unclear, match="list pods: HTTP 200, but the answer cannot be read"):
        await api.list(PODS, None)
    assert len(fake.requests) == 2 + kube_client.ATTEMPTS


async def test_large_objects_are_listed_in_smaller_pages(server: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 pods may have 300 MB, which would be in memory at once."""
    monkeypatch.setattr(kube_client, "LARGE_PAGE", 10_000)
    fake, api = server

    def respond(count: int, size: int, then: str = "next") -> None:
        fake.respond(200, {"items": [{"a": "x" * size}] * count, "metadata": {"continue": then}})

    async def limits(resource: Resource) -> list[int]:
        fake.requests.clear()
        async for _ in api.pages(resource, None):
            pass
        return [int(parse_qs(urlsplit(path).query)["limit"][0]) for _, path, _, _ in fake.requests]

    respond(200, 60)  # a little too large
    respond(100, 990)  # ten times too large
    respond(9, 10)
    respond(19, 10)
    respond(3, 10, "")  # not full
    assert await limits(PODS) == [200, 100, 9, 19, 29]
    respond(1, 30_000, "")
    assert await limits(PODS) == [29]
    respond(1, 30_000, "")
    assert await limits(PODS) == [1]
    respond(200, 10, "")
    assert await limits(EVENTS) == [200], "of another resource"


async def test_a_refusal_is_not_retried(server: Pair) -> None:
    fake, api = server
    fake.respond(403, {"message": "forbidden"})
    with pytest.raises(Refused):
        await api.create(PODS, "ns", {"metadata": {"name": "p"}})
    assert len(fake.requests) == 1


async def test_nothing_is_written_once_another_operator_may_lead(server: Pair) -> None:
    fake, api = server
    fake.respond(200, {})
    api.may_write = lambda: False
    with pytest.raises(KubeError, match="another operator may lead"):
        await api.create(PODS, "ns", {"metadata": {"name": "p"}})
    assert await api.get(PODS, "ns", "p") == {}


async def test_after_the_last_attempt_the_error_is_raised(server: Pair) -> None:
    fake, api = server
    for _ in range(kube_client.ATTEMPTS):
        fake.respond(500, {"message": "etcd"})
    with pytest.raises(Unclear, match="get pods p: etcd"):
        await api.get(PODS, "ns", "p")
    assert len(fake.requests) == kube_client.ATTEMPTS


async def test_no_response_is_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_client, "retry_delay", lambda attempt, retry_after: 0.0)
    api = KubeClient(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), RateLimit(100, 100))
    before = api.last_success
    with pytest.raises(Unclear):
        await api.get(PODS, "ns", "p")
    assert api.last_success == before
    await api.close()


async def test_a_separate_client_has_no_rate_limit_no_retries_and_a_timeout_of_its_own(server: Pair) -> None:
    fake, api = server
    api.limit = RateLimit(0.01, 1)
    busy = [asyncio.create_task(api.get(PODS, "ns", f"p-{i}")) for i in range(50)]
    separate = api.separate(timeout=0.2)
    try:
        async with asyncio.timeout(60):
            for _ in range(20):
                assert await separate.get(LEASES, "ns", "l") == {}
            fake.respond(500)
            with pytest.raises(Unclear):
                await separate.get(LEASES, "ns", "l")
            fake.hang = True
            with pytest.raises(Unclear, match="Timeout"):
                await separate.get(LEASES, "ns", "l")
        assert sum("leases" in path for _, path, _, _ in fake.requests) == 22
    finally:
        await separate.close()
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)


KUBECONFIG = {
    "current-context": "test",
    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    "clusters": [{"name": "test", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "test", "user": {}}],
}


@pytest.mark.parametrize(("proxy", "trusted"), [("http://proxy.example.org:3128", True), ("", False)])
async def test_aiohttp_reads_the_environment_only_for_a_proxy(
    proxy: str, trusted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise it looks for a netrc file, in another thread and for each request."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "example.org")
    if proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
    (tmp_path / "config").write_text(json.dumps(KUBECONFIG))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    api = await connect_cluster(rate=1000.0, burst=1000)
    monkeypatch.setattr(kube_client, "retry_delay", lambda attempt, retry_after: 0.0)
    with pytest.raises(Unclear):
        await api.get(PODS, "ns", "p")
    assert api.api.rest_client.pool_manager.trust_env is trusted
    await api.close()


async def test_the_lease_is_renewed_while_a_large_job_uses_all_connections(server: Pair) -> None:
    """200 creates hang: they use all that may be under way, and the rate."""
    fake, api = server
    fake.hang = True
    creates = [asyncio.create_task(api.create(PODS, "ns", {"metadata": {"name": f"p-{i}"}})) for i in range(200)]
    settings = OperatorSettings(image="i", namespace="ns", identity="me", health_port=0)
    lease_thread = LoopThread("lease")
    operator = Operator(settings, api, api.separate(timeout=REQUEST_TIMEOUT), api, lease_thread, asyncio.Event())
    try:
        async with asyncio.timeout(60):
            for _ in range(kube_client.AT_ONCE):
                await fake.hung.acquire()
            fake.hang = False
            assert await lease_thread.run(operator.new_election(0).try_acquire())
    finally:
        await lease_thread.run(operator.lease_api.close())
        await lease_thread.close()
        for task in creates:
            task.cancel()
        await asyncio.gather(*creates, return_exceptions=True)


def test_retry_delays_grow_and_follow_retry_after() -> None:
    assert 0.15 < kube_client.retry_delay(1, 0.0) < 0.25
    assert 2.3 < kube_client.retry_delay(1, 3.0) < 3.7
    assert kube_client.retry_delay(30, 0.0) <= kube_client.LONGEST_WAIT * 1.2


def test_the_rate_limit_allows_a_burst_and_then_the_rate() -> None:
    now = [100.0]
    limit = RateLimit(10.0, 5, clock=lambda: now[0])
    assert waits(limit, 8) == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2, 0.3])
    now[0] += 100
    assert waits(limit, 6) == pytest.approx([0, 0, 0, 0, 0, 0.1])


def waits(limit: RateLimit, number: int) -> list[float]:
    """Take tokens before they are there; return the seconds until each is."""
    found = []
    for _ in range(number):
        found.append(limit.until_next())
        limit.take()
    return found


async def test_requests_in_the_background_leave_half_of_the_burst_to_the_others(
    server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    fake, api = server
    api.limit = limit = RateLimit(10.0, 6, clock=lambda: now[0])

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("elasticjob_operator.kube.limits.asyncio.sleep", sleep)
    background = api.background()
    for number in range(5):
        await background.create(EVENTS, "ns", {"metadata": {"name": f"e-{number}"}})
    assert now[0] == pytest.approx(100.1)
    assert waits(limit, 4) == pytest.approx([0, 0, 0.1, 0.2])
    await background.create(EVENTS, "ns", {"metadata": {"name": "later"}})
    assert now[0] == pytest.approx(100.6)
    assert len(fake.requests) == 6
