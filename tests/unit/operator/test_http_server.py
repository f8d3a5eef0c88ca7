"""The server of probes and metrics: what it answers, and how little its clients can take from it."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from elasticjob_operator import metrics
from elasticjob_operator.kube import KubeError, Resource
from elasticjob_operator.kube.limits import RateLimit
from elasticjob_operator.serving import http_server, metrics_page
from elasticjob_operator.serving.http_server import (
    CONNECTIONS,
    RESPONSE_SECONDS,
    Certificate,
    HttpRequest,
    HttpResponse,
    HttpServer,
)
from elasticjob_operator.serving.metrics_page import (
    ALLOWED_SECONDS,
    REFUSED_SECONDS,
    REVIEW_BURST,
    REVIEWS_PER_SECOND,
    MetricsAccess,
    serve_metrics,
)


async def ok(_: HttpRequest) -> HttpResponse:
    return HttpResponse(b"ok\n")


async def fail(_: HttpRequest) -> HttpResponse:
    raise RuntimeError("boom")


@asynccontextmanager
async def served(server: HttpServer) -> AsyncIterator[int]:
    try:
        yield server.port
    finally:
        await server.close()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server with the pages /ok and /fail."""
    async with served(HttpServer("http", 0, {"/ok": ok, "/fail": fail})) as port:
        yield port


async def send(port: int, request: bytes) -> bytes:
    """Send these bytes; return all that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 20.0)


@pytest.mark.parametrize(
    ("request_", "status", "body"),
    [
        (b"GET /ok HTTP/1.1\r\nHost: h\r\n\r\n", b"200 OK", b"ok\n"),
        (b"GET /ok?a=b HTTP/1.0\r\n\r\n", b"200 OK", b"ok\n"),
        (b"HEAD /ok HTTP/1.1\r\n\r\n", b"200 OK", b""),
        (b"POST /ok HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405 Method Not Allowed", b"only GET and HEAD\n"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"404 Not Found", b"not found\n"),
        (b"GET /fail HTTP/1.1\r\n\r\n", b"500 Internal Server Error", b"an error of the operator: see its log\n"),
        (b"nonsense\r\n\r\n", b"400 Bad Request", b"not a request of HTTP/1.1\n"),
        (b"\xff\x00 / HTTP/9\r\n\r\n", b"400 Bad Request", b"not a request of HTTP/1.1\n"),
    ],
)
async def test_get_and_head_are_answered_and_nothing_else(
    port: int, request_: bytes, status: bytes, body: bytes
) -> None:
    head, _, rest = (await send(port, request_)).partition(b"\r\n\r\n")
    assert (head.splitlines()[0], rest) == (b"HTTP/1.1 " + status, body)
    assert b"Connection: close" in head
    assert (b"Allow: GET, HEAD" in head) == status.startswith(b"405")
    length = 3 if request_.startswith(b"HEAD") else len(body)
    assert f"Content-Length: {length}".encode() in head


async def test_a_client_that_sends_nothing_or_too_much_is_disconnected(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
    assert await send(port, b"GET /ok HT") == b""
    with suppress(ConnectionError):
        assert await send(port, b"GET /ok HTTP/1.1\r\nX: " + b"x" * 100_000) == b""


async def test_a_client_that_does_not_take_its_response_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "RESPONSE_SECONDS", 0.2)

    async def large(_: HttpRequest) -> HttpResponse:
        return HttpResponse(b"x" * 50_000_000)

    async with served(HttpServer("http", 0, {"/large": large})) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        with closing(writer):
            writer.write(b"GET /large HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(writer.drain(), 20.0)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(stalled(reader), 20.0)


async def stalled(reader: asyncio.StreamReader) -> None:
    """Take the response after the server has given up."""
    await asyncio.sleep(1.0)
    await reader.readexactly(50_000_000)


async def test_idle_connections_neither_grow_in_number_nor_keep_a_probe_away(port: int) -> None:
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20.0) for _ in range(300)]
    try:
        assert (await send(port, b"GET /ok HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\nok\n")
        open_ones = 0
        for connection in idle:
            connection.setblocking(False)
            try:
                assert connection.recv(1) == b"", "the server has closed it"
            except BlockingIOError:
                open_ones += 1
            except ConnectionError:
                continue
        assert open_ones < http_server.CONNECTIONS
        assert threading.active_count() == before
    finally:
        for connection in idle:
            connection.close()


# ---- TLS


def make_certificate(folder: Path, name: str) -> None:
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run([*line, *subject, *files], check=True, capture_output=True)


async def test_a_renewed_certificate_is_used_without_a_restart_and_idle_clients_are_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path, "first")
    async with served(HttpServer("http", 0, {"/ok": ok}, Certificate(tmp_path))) as port:
        assert await fetch_by_tls(port, tmp_path) == "ok\n"
        make_certificate(tmp_path, "second")
        assert await fetch_by_tls(port, tmp_path) == "ok\n"
        monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
        assert await send(port, b"") == b""
        with suppress(ConnectionError):
            assert not (await send(port, b"GET /ok HTTP/1.1\r\n\r\n")).startswith(b"HTTP"), "without TLS"


async def fetch_by_tls(port: int, folder: Path) -> str:
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    url = f"https://127.0.0.1:{port}/ok"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
        return await response.text()


def test_a_missing_certificate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tls\.crt"):
        Certificate(tmp_path)


# ---- the metrics


class Reviews:
    """An API server with one user, `prometheus`, whose token is `good`; the token `other` is another user's."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down = False

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert namespace == ""
        self.asked.append(resource.plural)
        if self.down:
            raise KubeError("no response")
        spec = body["spec"]
        if body["kind"] == "TokenReview":
            users = {"good": "prometheus", "other": "stranger"}
            known = spec["token"] in users
            user = {"username": users.get(spec["token"], ""), "groups": ["g"], "extra": {"k": ["v"]}}
            return {"status": {"authenticated": known, "user": user if known else {}}}
        assert (spec["groups"], spec["extra"]) == (["g"], {"k": ["v"]})
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"status": {"allowed": spec["user"] == "prometheus"}}


def bearer(token: str) -> HttpRequest:
    return HttpRequest("/metrics", headers={"authorization": f"Bearer {token}"})


async def test_only_users_who_may_get_the_url_read_the_metrics() -> None:
    access = MetricsAccess(Reviews())
    requests = [HttpRequest("/metrics"), bearer(""), bearer("bad"), bearer("other"), bearer("good")]
    requests.append(HttpRequest("/metrics", headers={"authorization": "Basic good"}))
    assert [await access.status(request) for request in requests] == [401, 401, 401, 403, 200, 401]


async def test_answers_about_tokens_are_kept_for_a_while_and_failures_are_not() -> None:
    reviews, now = Reviews(), 0.0
    access = MetricsAccess(reviews, lambda: now, RateLimit(1.0, 2000))
    reviews.down = True
    assert await access.status(bearer("good")) == 503
    reviews.down = False
    for token, status, seconds in (("good", 200, ALLOWED_SECONDS), ("other", 403, REFUSED_SECONDS)):
        assert await access.status(bearer(token)) == status
        reviews.asked.clear()
        now += seconds - 0.1
        assert (await access.status(bearer(token)), reviews.asked) == (status, [])
        now += 0.2
        assert await access.status(bearer(token)) == status
        assert reviews.asked == ["tokenreviews", "subjectaccessreviews"]
    for number in range(1000):
        assert await access.status(bearer(f"bad-{number}")) == 401
    reviews.asked.clear()
    assert (await access.status(bearer("good")), reviews.asked) == (200, []), "refused tokens are forgotten first"


async def test_tokens_of_any_client_cause_few_requests_and_an_allowed_one_does_not_wait_for_them() -> None:
    reviews, now = Reviews(), 0.0
    # No time passes by this clock, so no further token is reviewed until the test lets it pass.
    access = MetricsAccess(reviews, lambda: now, RateLimit(REVIEWS_PER_SECOND, REVIEW_BURST, lambda: now))
    assert await access.status(bearer("good")) == 200
    now += ALLOWED_SECONDS + 1.0
    reviews.asked.clear()
    async with asyncio.TaskGroup() as group:
        flood = [group.create_task(access.status(bearer(f"bad-{number}"))) for number in range(100)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(reviews.asked) == REVIEW_BURST
        allowed = group.create_task(access.status(bearer("good")))
        for _ in range(20):
            await asyncio.sleep(0)
        while not allowed.done():
            assert len(reviews.asked) <= REVIEW_BURST + 4
            now += 1.0 / REVIEWS_PER_SECOND
            await asyncio.wait({allowed}, timeout=0.5)
        assert await allowed == 200
        for task in flood:
            task.cancel()


def test_all_connections_of_the_page_are_answered_at_the_rate_of_the_reviews() -> None:
    assert CONNECTIONS / REVIEWS_PER_SECOND < RESPONSE_SECONDS


async def test_the_metrics_are_served_in_the_format_that_is_asked_for() -> None:
    assert [found.name for found in metrics.queue_depth.describe()] == ["elasticjob_queue_depth"]
    async with served(serve_metrics(0)) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        for path in ("/metrics", "/"):
            async with session.get(url + path) as response:
                assert "elasticjob_queue_depth" in await response.text()
        headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with session.get(f"{url}/metrics?name[]=elasticjob_queue_depth", headers=headers) as response:
            assert response.content_type == "application/openmetrics-text"
            lines = (await response.text()).splitlines()
        assert {line.split()[0] for line in lines if not line.startswith("#")} == {"elasticjob_queue_depth"}
    packed = metrics_page.render(HttpRequest("/metrics", headers={"accept-encoding": "gzip, deflate"}))
    assert packed.headers["Content-Encoding"] == "gzip"
    assert b"elasticjob_queue_depth" in gzip.decompress(packed.body)


async def test_metrics_with_authentication_say_why_they_refuse() -> None:
    async with served(serve_metrics(0, MetricsAccess(Reviews()))) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/metrics"
        for token, status, part in (
            ("", 401, "a bearer token"),
            ("other", 403, "may not get the URL"),
            ("good", 200, ""),
        ):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(url, headers=headers) as response:
                assert (response.status, part in await response.text()) == (status, True)
                assert ("WWW-Authenticate" in response.headers) == (status == 401)
