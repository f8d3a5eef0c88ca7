"""When a node counts as cut off: real links on loopback, with a short keep-alive time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from elasticjob.agent.monitoring.reachability import ReachabilityMonitor
from elasticjob.contract.messages import StartRound
from elasticjob.contract.names import RoundId
from elasticjob.keep_alive import KeepAlive
from elasticjob.store.client import StoreClient
from elasticjob.store.server import StoreServer

KEY = b"k" * 32
SHORT = KeepAlive(interval=0.05, max_attempts=1)


class Pair:
    """The node that hosts a round's store, and another node of the round."""

    def __init__(self) -> None:
        self.cut: asyncio.Queue[str] = asyncio.Queue()
        self.host = ReachabilityMonitor("run", KEY, SHORT, lambda: self.cut.put_nowait("host"))
        self.other = ReachabilityMonitor("run", KEY, SHORT, lambda: self.cut.put_nowait("other"))
        self.server = StoreServer(links=self.host.gate().accept)

    async def connect(self) -> None:
        port = await self.server.start("127.0.0.1")
        start = StartRound(RoundId(1, 0, 1), 0, 2, 0, 2, 0, 2, "127.0.0.1", port, 0, 3)
        self.host.begin_round(start)
        self.other.begin_round(replace(start, group_rank=1))
        self.client = await StoreClient.connect("127.0.0.1", port)
        await self.until(lambda: bool(self.host._links))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.wait_for(self.client.num_keys(), 10)

    def no_timer_runs(self) -> bool:
        return self.host._timer is None and self.other._timer is None and self.cut.empty()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.connect()
    yield pair
    pair.host.end_round()
    pair.other.end_round()
    pair.client.close()
    await pair.server.close()


async def test_nodes_continue_if_only_the_coordinator_is_unreachable(pair: Pair) -> None:
    pair.host.coordinator_link_changed(False, True)
    pair.other.coordinator_link_changed(False, True)
    assert pair.no_timer_runs()


async def test_a_node_continues_if_only_the_other_nodes_are_unreachable(pair: Pair) -> None:
    pair.other.end_round()
    await pair.until(lambda: not pair.host._links)
    assert pair.no_timer_runs()


async def test_a_store_host_without_any_link_is_cut_off(pair: Pair) -> None:
    pair.host.coordinator_link_changed(False, False)
    pair.other.end_round()
    assert await asyncio.wait_for(pair.cut.get(), 10) == "host"


async def test_a_node_that_reaches_neither_store_is_cut_off(pair: Pair) -> None:
    pair.other.coordinator_link_changed(False, False)
    await pair.server.close()
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"


async def test_a_coordinator_that_is_back_in_time_stops_the_timer(pair: Pair) -> None:
    pair.host.coordinator_link_changed(False, False)
    pair.other.end_round()
    await pair.until(lambda: not pair.host._links)
    assert pair.host._timer is not None
    pair.host.coordinator_link_changed(True, False)
    assert pair.no_timer_runs()


async def test_a_round_of_one_node_is_never_cut_off(pair: Pair) -> None:
    pair.host.begin_round(StartRound(RoundId(1, 0, 2), 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 3))
    pair.other.end_round()
    pair.host.coordinator_link_changed(False, True)
    assert pair.no_timer_runs()


async def test_a_node_without_the_key_does_not_count(pair: Pair) -> None:
    stranger = ReachabilityMonitor("run", b"x" * 32, SHORT, lambda: None)
    port = pair.server._server.sockets[0].getsockname()[1] if pair.server._server else 0
    stranger.begin_round(StartRound(RoundId(1, 0, 1), 1, 2, 1, 2, 1, 2, "127.0.0.1", port, 0, 3))
    await pair.until(lambda: pair.server.counters.dropped["refused-link"] > 0)
    assert len(pair.host._links) == 1
    stranger.end_round()
