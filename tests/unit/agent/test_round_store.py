"""The store of a round, as the agent that hosts it prepares it, and the connections of all workers of the round."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticjob._runtime.agent.round_stores import admit_workers
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import RoundId, StoreClients
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Op

NODES, WORKERS = 129, 8
START = StartRound(
    RoundId(1, 0, 1), 0, NODES, 0, NODES * WORKERS, 0, NODES * WORKERS, "127.0.0.1", 1, 0, 0,
    member_addresses=tuple(f"127.0.1.{node + 1}" for node in range(NODES)),
)  # fmt: skip
HELLO = wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.GETNUMKEYS)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 60 s"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("addresses_known", [True, False])
async def test_the_store_of_a_round_resets_no_connection_if_all_workers_connect_at_once(addresses_known: bool) -> None:
    """With 8 workers a node, there are more than 1024 of them. A network that translates addresses shows others."""
    _, open_files = raise_open_file_limit()
    store = StoreServer(clients=StoreClients.NODES)
    port = await store.start("127.0.0.1")
    admit_workers(store, START if addresses_known else replace(START, member_addresses=()), open_files)
    workers = []
    for rank in range(NODES * WORKERS):
        source = START.member_addresses[rank % NODES]
        workers.append(socket.create_connection(("127.0.0.1", port), 60, (source, 0)))
        workers[-1].sendall(HELLO)
        await asyncio.sleep(0)
    if not addresses_known:
        await until(lambda: sum(map(len, store.connections.waiting.values())) == NODES * WORKERS)
        for address in START.member_addresses:
            store.connections.add_agent(address)
    await until(lambda: not store.connections.unauthenticated)
    for worker in workers:
        assert await asyncio.to_thread(worker.recv, 8) == wire.i64(0)
        worker.close()
    assert not store.counters.dropped
    await store.close()


async def test_too_few_open_files_for_a_round_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        admit_workers(StoreServer(), START, 4096)
        assert not caplog.records
        admit_workers(StoreServer(), START, 1024)
    assert "the round's store gets 1161 connections or more, but" in caplog.text
