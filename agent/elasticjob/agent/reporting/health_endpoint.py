"""The agent's health endpoint, on the port that torch's agent reads from TORCHELASTIC_HEALTH_CHECK_PORT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

HEALTH_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
_TIMEOUT = 5.0
_LONGEST = 4096


async def serve_health(
    env: Mapping[str, str], health: Callable[[], str], metrics: Callable[[], str]
) -> asyncio.Server | None:
    """GET /metrics gives metrics, any other path health as JSON. None where no port is set, or it cannot be had."""
    if not env.get(HEALTH_PORT_VARIABLE):
        return None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT)
            text = request.split()[1:2] == [b"/metrics"]
            body = (metrics() if text else health()).encode()
            kind = "text/plain; version=0.0.4" if text else "application/json"
            head = (
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await asyncio.wait_for(writer.drain(), _TIMEOUT)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # a peer that asks for nothing
        finally:
            writer.close()

    try:
        port = int(env[HEALTH_PORT_VARIABLE])
        if not 0 < port < 1 << 16:
            raise ValueError("want a port, 1 to 65535")
        return await asyncio.start_server(answer, port=port, limit=_LONGEST)
    except (OSError, ValueError) as error:
        log.warning("no health endpoint: %s=%s: %s", HEALTH_PORT_VARIABLE, env[HEALTH_PORT_VARIABLE], error)
        return None
