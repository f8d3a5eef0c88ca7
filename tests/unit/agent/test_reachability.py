"""When a node counts as cut off: real links on loopback, with a short keep-alive time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import pytest

from elasticjob.agent.machine.write_permission import freeze_time, may_write_alone
from elasticjob.agent.monitoring import reachability
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


async def test_a_node_leaves_the_store_to_the_workers_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[float] = loop.create_future()

    async def connect(*_: object, **__: object) -> None:
        connected.set_result(loop.time())
        raise OSError("there is no store")

    monkeypatch.setattr(reachability, "connect", connect)
    node = ReachabilityMonitor("run", KEY, KeepAlive(interval=60, max_attempts=1), lambda: None)
    begun = loop.time()
    node.begin_round(StartRound(RoundId(1, 0, 1), 1, 2, 1, 2, 1, 2, "127.0.0.1", 1, 0, 3))
    assert await asyncio.wait_for(connected, 10) - begun >= reachability.LINK_DELAY
    node.end_round()


async def test_a_node_without_the_key_does_not_count(pair: Pair) -> None:
    stranger = ReachabilityMonitor("run", b"x" * 32, SHORT, lambda: None)
    port = pair.server._server.sockets[0].getsockname()[1] if pair.server._server else 0
    stranger.begin_round(StartRound(RoundId(1, 0, 1), 1, 2, 1, 2, 1, 2, "127.0.0.1", port, 0, 3))
    await pair.until(lambda: pair.server.counters.dropped["refused-link"] > 0)
    assert len(pair.host._links) == 1
    stranger.end_round()


# ---- more than half of a round's nodes -------------------------------------------------------------------------------


class Group:
    """The node that hosts the store of a round of four nodes, and the monitors of the others, by group rank."""

    def __init__(self, pair: Pair, server: StoreServer) -> None:
        assert server._server is not None
        self.cut: asyncio.Queue[int] = asyncio.Queue()
        self.nodes = [ReachabilityMonitor("run", KEY, SHORT, partial(self.cut.put_nowait, rank)) for rank in range(4)]
        self.host, self.server, self.until = self.nodes[0], server, pair.until
        port = server._server.sockets[0].getsockname()[1]
        self.start = StartRound(RoundId(1, 0, 1), 0, 4, 0, 4, 0, 4, "127.0.0.1", port, 0, 3)
        server.serve_link = self.host.gate().accept

    async def connect(self) -> None:
        for rank, node in enumerate(self.nodes):
            node.begin_round(replace(self.start, group_rank=rank))
        await self.until(lambda: len(self.host._links) == 3)

    async def end(self, *ranks: int) -> None:
        """End these nodes."""
        for rank in ranks:
            self.nodes[rank].end_round()
        await self.until(lambda: not {(self.start.round, rank) for rank in ranks} & self.host._links.keys())

    def lose_coordinator(self, *ranks: int) -> None:
        for rank in ranks:
            self.nodes[rank].coordinator_link_changed(False, True)

    async def next_cut(self) -> int:
        return await asyncio.wait_for(self.cut.get(), 10)


@pytest.fixture
async def group(pair: Pair) -> AsyncIterator[Group]:
    group = Group(pair, pair.server)
    await group.connect()
    yield group
    for node in group.nodes:
        node.end_round()


async def test_group_rank_0_without_more_than_half_of_the_nodes_is_cut_off(group: Group) -> None:
    group.lose_coordinator(0)
    await group.end(3)
    assert group.host._timer is None  # three of four nodes
    await group.end(2)
    assert await group.next_cut() == 0


async def test_the_nodes_that_a_cut_off_node_keeps_links_with_are_cut_off_too(group: Group) -> None:
    group.lose_coordinator(0, 1)
    await group.end(2, 3)
    assert await group.next_cut() == 0
    assert await group.next_cut() == 1


async def test_a_cut_off_node_accepts_links_once_it_reaches_the_coordinator(group: Group) -> None:
    group.lose_coordinator(0)
    await group.end(2, 3)
    assert await group.next_cut() == 0
    await group.until(lambda: not group.host._links and not group.nodes[1]._has_link)
    # Group rank 1 tries again, and is refused.
    await group.until(lambda: group.nodes[1]._has_link)
    await group.until(lambda: not group.host._links and not group.nodes[1]._has_link)
    group.host.coordinator_link_changed(True, False)
    await group.until(lambda: bool(group.host._links))
    assert group.cut.empty()  # group rank 1 reached the coordinator all the time


async def test_a_node_that_connects_twice_counts_once(group: Group) -> None:
    key = (group.start.round, 1)
    first = group.host._links[key]
    twin = ReachabilityMonitor("run", KEY, SHORT, lambda: None)
    twin.begin_round(replace(group.start, group_rank=1))
    await group.until(lambda: group.host._links[key] is not first)
    group.lose_coordinator(0)
    await group.end(2, 3)
    assert await group.next_cut() == 0
    twin.end_round()


async def test_a_link_of_another_round_does_not_count(group: Group) -> None:
    group.host.begin_round(replace(group.start, round=RoundId(1, 0, 2)))
    group.lose_coordinator(0)
    assert await group.next_cut() == 0


async def test_a_node_whose_first_link_does_not_come_up_is_cut_off(pair: Pair) -> None:
    pair.other.coordinator_link_changed(True, False)
    await pair.server.close()
    pair.other.begin_round(StartRound(RoundId(1, 0, 2), 1, 2, 1, 2, 1, 2, "127.0.0.1", 1, 0, 3))
    pair.other.coordinator_link_changed(False, False)
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"


@pytest.mark.parametrize(
    ("size", "linked", "allowed"),
    [(1, (), True), (2, (), False), (2, (1,), True), (3, (2,), True), (4, (1,), False), (4, (1, 3), True)],
)
def test_group_rank_0_may_write_alone_with_more_than_half(size: int, linked: tuple[int, ...], allowed: bool) -> None:
    assert may_write_alone(0, size, linked) is allowed


def test_other_nodes_may_write_alone_while_group_rank_0_keeps_their_link() -> None:
    assert may_write_alone(1, 4, (0,))
    assert not may_write_alone(1, 4, ())


@pytest.mark.parametrize(
    ("coordinator", "majority", "at"), [(None, 5.0, None), (5.0, None, None), (5.0, 7.0, 10.0), (8.0, 5.0, 11.0)]
)
def test_a_node_freezes_when_both_have_been_lost_for_the_keep_alive_time(
    coordinator: float | None, majority: float | None, at: float | None
) -> None:
    assert freeze_time(coordinator, majority, 3.0) == at
