"""All workers of a large round connect to its store: `python -m benchmarks.many_connections NODES WORKERS`.

The store has no sockets: 4096 nodes of 8 workers need more open files than many computers allow. The output is one JSON
object. Each node has an address of its own, 127.64.0.1 and following.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.row import OURS, Row, Sample
from elasticjob._runtime.agent.round_stores import admit_workers
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import RoundId, StoreClients
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.client_connection import ClientConnection
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Op

ROOT = Path(__file__).parents[1]
KEY = bytes(32)
ROUND = RoundId(1, 0, 1)
HELLO = wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.PING, number=1)
ANSWER = 4
"""Bytes of the answer to HELLO."""
PATIENCE = 60.0
"""Seconds that the workers wait for the answers, at most."""


def address(node: int) -> str:
    return f"127.64.{node // 250}.{node % 250 + 1}"


def start_round(nodes: int, workers: int) -> StartRound:
    """Return what group rank 0 gets."""
    addresses = tuple(address(node) for node in range(nodes))
    ranks = nodes * workers
    return StartRound(ROUND, 0, nodes, 0, ranks, 0, ranks, "127.0.0.1", 1, 0, 0, member_addresses=addresses)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # not worth an event
        await asyncio.sleep(0.01)


class _Connection(asyncio.Transport):
    """A connection to the store without a socket."""

    def __init__(self, source: str, sock: socket.socket) -> None:
        super().__init__({"peername": (source, 1), "sockname": ("127.0.0.1", 1), "socket": sock})
        self.answer = b""
        self._closing = False

    def write(self, data: Any) -> None:
        self.answer += data

    def abort(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def _open(store: StoreServer, source: str, sock: socket.socket) -> _Connection:
    """Open a connection to the store, over which a worker has sent its first requests."""
    connection, protocol = _Connection(source, sock), ClientConnection(store)
    protocol.connection_made(connection)
    protocol.get_buffer(-1)[: len(HELLO)] = HELLO
    protocol.buffer_updated(len(HELLO))
    return connection


async def simulate(nodes: int, workers: int) -> dict[str, float]:
    """Let all workers connect before their addresses are admitted, as where the network translates addresses; then let
    each node open its link. Return the connections that the store has reset, and the CPU seconds of both."""
    raise_open_file_limit()
    store = StoreServer(clients=StoreClients.NODES)
    admit_workers(store, replace(start_round(nodes, workers), member_addresses=()), 1 << 20)
    with socket.socket() as sock:
        began = time.process_time()
        connections = [_open(store, address(node), sock) for _ in range(workers) for node in range(nodes)]
        waiting = time.process_time()
        for node in range(nodes):
            store.connections.add_agent(address(node))
        await _until(lambda: all(c.answer or c.is_closing() for c in connections))
        ended = time.process_time()
    reset = sum(c.is_closing() for c in connections)
    return {"reset": reset, "waiting": waiting - began, "answered": ended - began}


def _row(nodes: int, workers: int) -> Row:
    def once(_: Path) -> Sample:
        argv = [sys.executable, "-m", "benchmarks.many_connections", str(nodes), str(workers)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
        if done.returncode:
            return Sample(None, done.stderr.strip()[-300:])
        figures = json.loads(done.stdout)
        return Sample(figures.pop("reset"), parts=figures)

    title = (
        f"round's store: {nodes} nodes of {workers} workers connect at once: connections that it resets"
        " (no sockets, no address is known)"
    )
    return Row(f"connect-{nodes}x{workers}", title, "", 0, {OURS: once}, {OURS: 3}, 60)


ROWS = [_row(4096, 8)]


def main() -> None:
    print(json.dumps(asyncio.run(simulate(*map(int, sys.argv[1:])))))


if __name__ == "__main__":
    main()
