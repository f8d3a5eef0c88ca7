"""Probes: alive means that the work gets done, not only that a loop turns."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

MAX_QUEUE_WAIT = 120.0
"""Seconds that a due job may wait."""
MAX_API_SILENCE = 120.0
"""Seconds since the API server's last good answer."""


def probe_result(oldest_wait: float, silence: float) -> tuple[bool, str]:
    """Whether the operator works, and a line that says so."""
    told = f"oldest job waits {oldest_wait:.0f} s, last answer of the API server {silence:.0f} s ago"
    return oldest_wait <= MAX_QUEUE_WAIT and silence <= MAX_API_SILENCE, told


async def serve_probes(port: int, oldest_wait: Callable[[], float], silence: Callable[[], float]) -> web.AppRunner:
    """Serve /healthz and /readyz; `cleanup()` of the result stops it."""

    async def probe(_: web.Request) -> web.Response:
        good, told = probe_result(oldest_wait(), silence())
        return web.Response(status=200 if good else 503, text=told + "\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", probe)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
