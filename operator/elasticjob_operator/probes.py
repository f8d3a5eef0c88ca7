"""Health probes: /healthz fails when due jobs are not reconciled or the API server does not answer."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

MAX_QUEUE_WAIT = 120.0
"""Longest time in seconds that a due job may wait for its reconcile."""
MAX_API_SILENCE = 120.0
"""Longest time in seconds without a successful response of the API server."""


def probe_result(oldest_wait: float, silence: float) -> tuple[bool, str]:
    """Return whether the operator works, and a line with the two times, both in seconds."""
    message = (
        f"the longest waiting job is {oldest_wait:.0f} s overdue, the API server last answered {silence:.0f} s ago"
    )
    return oldest_wait <= MAX_QUEUE_WAIT and silence <= MAX_API_SILENCE, message


async def serve_probes(port: int, oldest_wait: Callable[[], float], silence: Callable[[], float]) -> web.AppRunner:
    """Serve /healthz and /readyz on `port`; `cleanup()` of the returned runner stops serving."""

    async def probe(_: web.Request) -> web.Response:
        healthy, message = probe_result(oldest_wait(), silence())
        return web.Response(status=200 if healthy else 503, text=message + "\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", probe)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
