"""Health probes: /healthz says that the event loop turns, /readyz that the operator keeps up; so do metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import prometheus_client
import pytest

from elasticjob_operator import metrics
from elasticjob_operator.serving import probes
from elasticjob_operator.serving.http_server import HttpServer
from elasticjob_operator.serving.probes import MAX_API_SILENCE, MAX_QUEUE_WAIT, readiness, serve_probes
from support.common.ports import free_port


@pytest.mark.parametrize(
    ("name", "oldest_wait", "silence", "blind", "ready"),
    [
        ("idle", 0.0, 0.0, "", True),
        ("10,000 finished jobs after a start", MAX_QUEUE_WAIT + 1, 0.0, "", False),
        ("an API server that is down for ten minutes", 0.0, 600.0, "", False),
        ("just within both limits", MAX_QUEUE_WAIT, MAX_API_SILENCE, "", True),
        ("the permission to watch pods was taken away", 0.0, 0.0, "the watch on pods fails", False),
    ],
)
async def test_only_readiness_tells_of_backlog_and_api_silence(
    name: str, oldest_wait: float, silence: float, blind: str, ready: bool
) -> None:
    assert readiness(oldest_wait, silence, blind)[0] is ready
    port = free_port()
    served = serve_probes(port, lambda: oldest_wait, lambda: silence, lambda: blind)
    try:
        assert await fetch(port, "healthz") == (200, "ok\n")
        status, message = await fetch(port, "readyz")
        assert (status, f"{silence:.0f} s ago" in message) == (200 if ready else 503, True)
        assert blind in message
    finally:
        await served.close()


async def test_a_hanging_event_loop_fails_the_liveness_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ANSWER_SECONDS", 0.5)
    port, hang = free_port(), threading.Event()
    with loop_that_serves(port) as loop:
        assert await fetch(port, "healthz") == (200, "ok\n")
        loop.call_soon_threadsafe(hang.wait, 60.0)
        try:
            assert (await fetch(port, "healthz"))[0] == 503
        finally:
            hang.set()
        assert await fetch(port, "healthz") == (200, "ok\n")


def test_the_metrics_tell_of_backlog_and_api_silence() -> None:
    metrics.queue_wait.set_function(lambda: 7.0)
    metrics.api_silence.set_function(lambda: 9.0)
    text = prometheus_client.generate_latest().decode()
    assert "\nelasticjob_queue_wait_seconds 7.0\n" in text
    assert "\nelasticjob_api_silence_seconds 9.0\n" in text


@contextmanager
def loop_that_serves(port: int) -> Iterator[asyncio.AbstractEventLoop]:
    """Serve the probes from an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def serve() -> HttpServer:
        return serve_probes(port, lambda: 0.0, lambda: 0.0, lambda: "")

    served = asyncio.run_coroutine_threadsafe(serve(), loop).result(10.0)
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(served.close(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


async def fetch(port: int, path: str, timeout: float = 10.0) -> tuple[int, str]:
    """Return status and body of a probe's response."""
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit) as session, session.get(f"http://127.0.0.1:{port}/{path}") as found:
        return found.status, await found.text()
