"""Health probes: /healthz succeeds while the event loop turns, /readyz while the operator also keeps up.

A restart neither works off a backlog nor brings the API server back, so neither of them fails /healthz.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from elasticjob.listening_socket import listen_on_all_addresses

_BACKLOG = 128
"""Connections that wait until the server accepts them."""
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


async def serve_probes(
    port: int, oldest_wait: Callable[[], float], silence: Callable[[], float], blind: Callable[[], str]
) -> web.AppRunner:
    """Serve /healthz and /readyz on `port`; `cleanup()` of the returned runner stops serving."""

    async def health(_: web.Request) -> web.Response:
        # The event loop that answers is the one that reconciles: if it hangs, the probe gets no answer.
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        keeps_up, message = readiness(oldest_wait(), silence(), blind())
        return web.Response(status=200 if keeps_up else 503, text=message + "\n")

    app = web.Application()
    app.router.add_get("/healthz", health)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listen_on_all_addresses(port, backlog=_BACKLOG)).start()
    return runner
