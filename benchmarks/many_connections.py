"""All workers of a large round connect to its store: `python -m benchmarks.many_connections WHAT NODES WORKERS`.

WHAT is `serve` (the store, as an agent makes it; it prints its port), `connect` (all workers over TCP, with the port as
last argument) or `simulate` (the same without sockets, in one process). The output is one JSON object. Each node has an
address of its own, 127.64.0.1 and following. Its link comes as late as an agent opens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.process_group import serving
from benchmarks.row import OURS, Row, Sample
from elasticjob._runtime.agent.monitoring.node.reachability import ReachabilityMonitor
from elasticjob._runtime.agent.round_stores import admit_workers
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import RoundId, StoreClients
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.client_connection import ClientConnection
from elasticjob._runtime.store.open_files import RESERVED_FILES, raise_open_file_limit
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Op
from elasticjob._runtime.system.keep_alive import KeepAlive

ROOT = Path(__file__).parents[1]
KEY = bytes(32)
ROUND = RoundId(1, 0, 1)
HELLO = wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.PING, number=1)
ANSWER = 4
"""Bytes of the answer to HELLO."""
PATIENCE = 60.0
"""Seconds that a worker waits for the answer."""


def address(node: int) -> str:
    return f"127.64.{node // 250}.{node % 250 + 1}"


def start_round(nodes: int, workers: int) -> StartRound:
    """Return what group rank 0 gets."""
    addresses = tuple(address(node) for node in range(nodes))
    ranks = nodes * workers
    return StartRound(ROUND, 0, nodes, 0, ranks, 0, ranks, "127.0.0.1", 1, 0, 0, member_addresses=addresses)


def files_needed(nodes: int, workers: int) -> int:
    """Return how many open files the store's process needs."""
    return nodes * workers + nodes + RESERVED_FILES


# ---- over TCP


async def serve(nodes: int, workers: int) -> None:
    store = StoreServer(links=_monitor().gate().accept, clients=StoreClients.NODES)
    open_files = raise_open_file_limit()[1]
    port = await store.start("127.0.0.1")
    admit_workers(store, start_round(nodes, workers), open_files)
    print("serving", port, flush=True)
    await asyncio.Event().wait()


def _connect_workers(nodes: int, workers: int, port: int) -> int:
    """Connect all workers, each of which sends at once and waits; return how many have no answer."""
    connections = []
    for node in range(nodes * workers):
        connection = socket.create_connection(("127.0.0.1", port), PATIENCE, (address(node % nodes), 0))
        connections.append(connection)
        with contextlib.suppress(ConnectionError):
            connection.sendall(HELLO)
    return sum(not _is_answered(connection) for connection in connections)


def _is_answered(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return len(connection.recv(ANSWER, socket.MSG_WAITALL)) == ANSWER
    return False


_SOURCE: ContextVar[str] = ContextVar("_SOURCE")
"""The address from which the links of a task come."""


class _Loop(asyncio.SelectorEventLoop):
    async def create_connection(self, *arguments: Any, **options: Any) -> Any:
        return await super().create_connection(*arguments, **options, local_addr=(_SOURCE.get(), 0))


def _monitor() -> ReachabilityMonitor:
    return ReachabilityMonitor("bench", KEY, KeepAlive(), lambda: None)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # not worth an event
        await asyncio.sleep(0.01)


async def connect_all(nodes: int, workers: int, port: int) -> dict[str, float]:
    """Return how many workers' connections the store has reset, and the seconds until the last answer."""
    raise_open_file_limit()
    others, start = [_monitor() for _ in range(1, nodes)], start_round(nodes, workers)
    began = time.monotonic()
    for rank, node in enumerate(others, 1):
        _SOURCE.set(address(rank))  # of the task that the node starts
        node.begin_round(replace(start, group_rank=rank, master_port=port, member_addresses=()))
    reset = await asyncio.to_thread(_connect_workers, nodes, workers, port)
    answered = time.monotonic() - began
    await asyncio.wait_for(_until(lambda: all(node._first_node for node in others)), PATIENCE)
    return {"reset": reset, "answered": answered, "links": time.monotonic() - began}


# ---- without sockets


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
            store.connections.add_node(address(node))
        await _until(lambda: all(c.answer or c.is_closing() for c in connections))
        ended = time.process_time()
    reset = sum(c.is_closing() for c in connections)
    return {"reset": reset, "waiting": waiting - began, "answered": ended - began}


# ---- rows


def _over_tcp(nodes: int, workers: int) -> Callable[[Path], Sample]:
    def once(_: Path) -> Sample:
        needed, allowed = files_needed(nodes, workers), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if allowed < needed:
            return Sample(None, f"it needs a hard limit of {needed} open files, which is {allowed} here")
        size = [str(nodes), str(workers)]
        with serving(["-m", "benchmarks.many_connections", "serve", *size]) as (port, _pid):
            return _sample("connect", *size, str(port))

    return once


def _in_memory(nodes: int, workers: int) -> Callable[[Path], Sample]:
    return lambda _: _sample("simulate", str(nodes), str(workers))


def _sample(*arguments: str) -> Sample:
    argv = [sys.executable, "-m", "benchmarks.many_connections", *arguments]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
    if done.returncode:
        return Sample(None, done.stderr.strip()[-300:])
    figures = json.loads(done.stdout)
    return Sample(figures.pop("reset"), parts=figures)


def _row(name: str, title: str, nodes: int, workers: int, once: Callable[[Path], Sample]) -> Row:
    return Row(name, title.format(nodes, workers), "", 0, {OURS: once}, {OURS: 3}, 60)


_TITLE = "round's store: {} nodes of {} workers connect at once: connections that it resets"
ROWS = [
    _row("connect-1000x8", _TITLE, 1000, 8, _over_tcp(1000, 8)),
    _row("connect-4096x8", f"{_TITLE} (no sockets, no address is known)", 4096, 8, _in_memory(4096, 8)),
]
"""4096 nodes of 8 need more open files than many machines allow (`files_needed`), so that row has no sockets."""


def main() -> None:
    what, nodes, workers, *port = sys.argv[1], *map(int, sys.argv[2:])
    if what == "serve":
        asyncio.run(serve(nodes, workers))
    with asyncio.Runner(loop_factory=_Loop if what == "connect" else None) as runner:
        figures = runner.run(connect_all(nodes, workers, *port) if what == "connect" else simulate(nodes, workers))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
