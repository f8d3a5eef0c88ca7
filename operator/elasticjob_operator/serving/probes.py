"""Health probes: /healthz succeeds while the event loop turns, /readyz while the operator also keeps up.

A restart neither works off a backlog nor brings the API server back, so neither of them fails /healthz.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elasticjob_operator.serving.http_server import HttpRequest, HttpResponse, HttpServer, ask_loop

ANSWER_SECONDS = 3.0
"""Seconds after which the event loop counts as hanging. The chart's probes wait for 5 s."""
MAX_QUEUE_WAIT = 120.0
"""Longest time in seconds that a due job may wait for its reconcile."""
MAX_API_SILENCE = 120.0
"""Longest time in seconds without a successful response of the API server."""


def readiness(oldest_wait: float, silence: float, blind: str) -> tuple[bool, str]:
    """Return whether the operator keeps up, and a line with the two times, both in seconds.

    `blind`: what it has not seen for long, empty if nothing; the line ends with it.
    """
    message = (
        f"the longest waiting job is {oldest_wait:.0f} s overdue, the API server last answered {silence:.0f} s ago"
    )
    keeps_up = oldest_wait <= MAX_QUEUE_WAIT and silence <= MAX_API_SILENCE and not blind
    return keeps_up, f"{message}; {blind}" if blind else message


def serve_probes(
    port: int, oldest_wait: Callable[[], float], silence: Callable[[], float], blind: Callable[[], str]
) -> HttpServer:
    """Serve /healthz and /readyz on `port`. The running event loop answers them: if it hangs, the probes fail."""
    loop = asyncio.get_running_loop()

    def health() -> HttpResponse:
        return HttpResponse(b"ok\n")

    def ready() -> HttpResponse:
        keeps_up, message = readiness(oldest_wait(), silence(), blind())
        return HttpResponse(f"{message}\n".encode(), 200 if keeps_up else 503)

    async def health_page(_: HttpRequest) -> HttpResponse:
        return await ask_loop(loop, health, ANSWER_SECONDS)

    async def ready_page(_: HttpRequest) -> HttpResponse:
        return await ask_loop(loop, ready, ANSWER_SECONDS)

    return HttpServer("probes", port, {"/healthz": health_page, "/readyz": ready_page})
