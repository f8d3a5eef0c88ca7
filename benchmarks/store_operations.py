"""Store operations per second: our store against torch's C++ server, with the same clients."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

from benchmarks.crowd import cpu_seconds
from benchmarks.ours import Ours, free_port
from benchmarks.output import Output
from benchmarks.row import OURS, Row, Sample
from benchmarks.stock import torch_store
from elasticjob._runtime.contract.names import Backend
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.wire import Op

TORCH = "torch's server"
SECONDS = 2.0
CONNECTIONS = 64
BATCH = 100
"""Requests that each connection sends before it reads the answers."""


@contextmanager
def our_server(folder: Path) -> Iterator[tuple[int, int]]:
    """Start our store; yield its port and its process id."""
    with Ours(folder, backend=Backend.C10D) as side:
        side.start(0)
        side.wait_until_serving()
        assert side.store is not None
        yield side.port, side.store.pid


@contextmanager
def torch_server(folder: Path) -> Iterator[tuple[int, int]]:
    """Start torch's store; yield its port and its process id."""
    port = free_port()
    process = torch_store(port, Output(), folder)
    try:
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def one_connection(port: int) -> float:
    """Return operations per second of torch's client: set and get in turns."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    done, began = 0, time.monotonic()
    while (took := time.monotonic() - began) < SECONDS:
        for _ in range(50):
            store.set("key", "value")
            store.get("key")
        done += 100
    return done / took


def many_connections(port: int) -> float:
    """Return additions per second, pipelined over many connections so that the client needs little CPU time."""
    requests = wire.request(Op.ADD, [b"/key"], number=1) * BATCH
    selector, peers = selectors.DefaultSelector(), []
    for _ in range(CONNECTIONS):
        peer = socket.create_connection(("127.0.0.1", port))
        peer.sendall(wire.request(Op.VALIDATE, number=wire.MAGIC) + requests)
        peers.append(peer)
        selector.register(peer, selectors.EVENT_READ)
    answered, pending, began = 0, dict.fromkeys(peers, BATCH * 8), time.monotonic()
    while (took := time.monotonic() - began) < SECONDS:
        for key, _ in selector.select(1.0):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            received = len(ready.recv(BATCH * 8))
            answered += received
            pending[ready] -= received
            if pending[ready] <= 0:
                pending[ready] += BATCH * 8
                ready.sendall(requests)
    for peer in peers:
        peer.close()
    return answered / 8 / took


def _row(name: str, title: str, want: float, count: Callable[[int], float]) -> Row:
    def measure(serve: Callable[[Path], AbstractContextManager[tuple[int, int]]]) -> Callable[[Path], Sample]:
        def once(folder: Path) -> Sample:
            with serve(folder) as (port, pid):
                before = cpu_seconds(pid)
                rate = count(port)
                used = cpu_seconds(pid) - before
            return Sample(rate, parts={"server's processor, microseconds each": used / (rate * SECONDS) * 1e6})

        return once

    sides = {OURS: measure(our_server), TORCH: measure(torch_server)}
    return Row(name, title, "/s", want, sides, {OURS: 5, TORCH: 5}, 35, more_is_better=True)


ROWS = [
    _row("store-one", "store: set and get over one connection", 10_000, one_connection),
    _row("store-many", f"store: additions over {CONNECTIONS} connections, pipelined", 10_000, many_connections),
]
