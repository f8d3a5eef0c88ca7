"""The agent's health endpoint, on the port that torch's agent reads from TORCHELASTIC_HEALTH_CHECK_PORT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from elasticjob._runtime.system.sockets.listening_socket import listen_on_all_addresses

log = logging.getLogger(__name__)

HEALTH_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
_TIMEOUT = 5.0
"""Seconds for a request, and for its answer."""
_BACKLOG = 100
"""Connections that wait until the endpoint accepts them."""
_MAX_REQUEST = 4096
"""Bytes."""


async def serve_health(
    env: Mapping[str, str], health: Callable[[], str], metrics: Callable[[], str]
) -> asyncio.Server | None:
    """Start to serve `metrics()` at /metrics and `health()`, JSON, at any other path.

    Return None when the variable is not set, or its port is invalid or in use.
    """
    if not env.get(HEALTH_PORT_VARIABLE):
        return None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT)
            wants_metrics = request.split()[1:2] == [b"/metrics"]
            body = (metrics() if wants_metrics else health()).encode()
            content_type = "text/plain; version=0.0.4" if wants_metrics else "application/json"
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
            writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
            await asyncio.wait_for(writer.drain(), _TIMEOUT)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # no complete request, or the client has closed the connection
        except Exception:
            log.exception("the health endpoint has not answered a request")
        finally:
            writer.close()

    try:
        port = int(env[HEALTH_PORT_VARIABLE])
        if not 0 < port < 1 << 16:
            raise ValueError("want a port, 1 to 65535")
        sock = listen_on_all_addresses(port, backlog=_BACKLOG)
        return await asyncio.start_server(answer, sock=sock, limit=_MAX_REQUEST)
    except (OSError, ValueError) as error:
        log.warning("health endpoint did not start: %s=%s: %s", HEALTH_PORT_VARIABLE, env[HEALTH_PORT_VARIABLE], error)
        return None
