"""When a node counts as cut off: real links on loopback, whose ages and whose coordinator the tests set."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from elasticjob._runtime.agent.monitoring.node import reachability
from elasticjob._runtime.agent.monitoring.node.reachability import ReachabilityMonitor
from elasticjob._runtime.agent.state_machine.round.write_permission import permission_end
from elasticjob._runtime.contract.messages import MemberLink, StartRound
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link.link import ControlLink
from elasticjob._runtime.rendezvous.state import TAKEOVER_TIMEOUT
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive
from support.common.store_client import StoreClient

KEY = b"k" * 32


class ShortTrust(KeepAlive):
    @property
    def trusted_seconds(self) -> float:
        return 0.05


SHORT = ShortTrust()
AGES = dict[ControlLink, float]()
"""Seconds since the last answer over each link; 0 for others."""


@pytest.fixture(autouse=True)
def ages(monkeypatch: pytest.MonkeyPatch) -> None:
    AGES.clear()
    monkeypatch.setattr(ControlLink, "seconds_since_answer", lambda link: AGES.get(link, 0.0))


class Coordinator:
    """A link to the coordinator."""

    def __init__(self) -> None:
        self.lost_by_keep_alive = False
        self.age = 0.0

    def seconds_since_answer(self) -> float:
        return self.age


def now() -> float:
    return asyncio.get_running_loop().time()


def reach(node: ReachabilityMonitor) -> Coordinator:
    """Give a node a link to the coordinator."""
    coordinator = Coordinator()
    node.coordinator_link_changed(cast("ControlLink", coordinator))
    return coordinator


def lose(node: ReachabilityMonitor) -> None:
    """Take the link away; the coordinator had not answered for long."""
    assert node.coordinator is not None
    cast("Coordinator", node.coordinator).lost_by_keep_alive = True
    node.coordinator_link_changed(None)


class Pair:
    """The node that hosts a round's store, and another node of the round."""

    def __init__(self) -> None:
        self.cut: asyncio.Queue[str] = asyncio.Queue()
        self.greeted: asyncio.Queue[str] = asyncio.Queue()
        self.host, self.other = (
            ReachabilityMonitor("run", KEY, SHORT, partial(self.cut.put_nowait, n), partial(self.greeted.put_nowait, n))
            for n in ("host", "other")
        )
        self.server = StoreServer(links=self.host.gate().accept)

    async def connect(self, number: int = 1) -> None:
        self.port = port = await self.server.start("127.0.0.1")
        start = StartRound(RoundId(1, 0, number), 0, 2, 0, 2, 0, 2, "127.0.0.1", port, 0, 3)
        for rank, node in enumerate((self.host, self.other)):
            reach(node)
            node.begin_round(replace(start, group_rank=rank))
        self.client = await StoreClient.connect("127.0.0.1", port)
        await self.until(lambda: bool(self.host.links) and self.other.round_store_link is not None)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.wait_for(self.client.num_keys(), 10)

    async def goes_on(self, *nodes: ReachabilityMonitor) -> None:
        """Wait until each node has found three times that it may write."""
        for node in nodes * 3:
            timer = node.next_check
            await self.until(lambda: node.next_check is not timer)  # noqa: B023
        assert self.cut.empty()


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
    for node in (pair.host, pair.other):
        lose(node)
    await pair.goes_on(pair.host, pair.other)


async def test_a_node_continues_if_only_the_other_nodes_are_unreachable(pair: Pair) -> None:
    pair.other.end_round()
    AGES.update(dict.fromkeys(pair.host.links.values(), math.inf))
    await pair.until(lambda: not pair.host.links)
    await pair.goes_on(pair.host)


@pytest.mark.parametrize("reason", ["closed", "lost", "silent"])
async def test_a_store_host_without_any_link_is_cut_off(pair: Pair, reason: str) -> None:
    if reason == "closed":
        pair.host.coordinator_link_changed(None)
    elif reason == "lost":
        lose(pair.host)
    else:
        cast("Coordinator", pair.host.coordinator).age = 1.0
    pair.other.end_round()
    assert await asyncio.wait_for(pair.cut.get(), 10) == "host"
    assert pair.greeted.empty()


async def test_a_coordinator_that_answers_again_over_the_same_link_is_greeted(pair: Pair) -> None:
    """Links that keep-alive has not found lost yet count by their last answers: the coordinator's side may be first."""
    coordinator = cast("Coordinator", pair.host.coordinator)
    coordinator.age = 1.0
    AGES.update(dict.fromkeys(pair.host.links.values(), math.inf))
    assert await asyncio.wait_for(pair.cut.get(), 10) == "host"
    assert pair.greeted.empty()
    coordinator.age = 0.0
    assert await asyncio.wait_for(pair.greeted.get(), 10) == "host"
    await pair.goes_on(pair.host)


@pytest.mark.parametrize("reason", ["closed", "silent"])
async def test_a_node_that_reaches_neither_store_is_cut_off(pair: Pair, reason: str) -> None:
    pair.other.coordinator_link_changed(None)
    if reason == "closed":
        await pair.server.close()
    else:
        assert pair.other.round_store_link is not None
        AGES[pair.other.round_store_link] = math.inf
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"


async def test_a_coordinator_that_closes_the_link_counts_while_its_successor_waits(pair: Pair) -> None:
    pair.host.keep_alive = KeepAlive(interval=60)
    before = now()
    pair.host.coordinator_link_changed(None)
    assert before + TAKEOVER_TIMEOUT <= pair.host.coordinator_end() <= now() + TAKEOVER_TIMEOUT


@pytest.mark.slow
async def test_a_node_that_has_ended_its_round_gives_no_permission_to_the_others(pair: Pair) -> None:
    """The coordinator may begin another round then, with it and without those that only it reaches."""
    lose(pair.other)
    pair.host.end_round()
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"
    # Group rank 1 tries again, and is refused.
    await pair.until(lambda: pair.other.round_store_link is not None)
    await pair.until(lambda: pair.other.round_store_link is None)
    assert not pair.host.links


async def test_a_node_that_has_ended_its_round_without_a_coordinator_is_counted_until_the_next(pair: Pair) -> None:
    """The others may still save: without a coordinator, no round follows."""
    lose(pair.host)
    lose(pair.other)
    pair.host.end_round()
    await pair.goes_on(pair.other)
    reach(pair.host)
    pair.host.begin_round(StartRound(RoundId(1, 0, 2), 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 3))
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"


async def test_a_link_without_an_answer_is_sent_data_before_its_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP repeats data within the time for which answers count, but a lost probe only after it."""
    lose(pair.other)
    link = pair.other.round_store_link
    assert link is not None
    sent: list[object] = []
    monkeypatch.setattr(link, "send", sent.append)
    pair.other.keep_alive = KeepAlive()
    pair.other.start_until = -math.inf
    AGES[link] = 1.2
    pair.other.check_within()
    await pair.until(lambda: pair.other.next_check is not None and pair.other.next_check.when() > now() + 0.01)
    assert not sent
    AGES[link] = 1.3
    pair.other.check_within()
    await pair.until(lambda: bool(sent))
    assert sent == [MemberLink(RoundId(1, 0, 1), 1)]
    assert pair.cut.empty()
    AGES[link] = 1.8
    pair.other.check_within()
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"


async def test_a_round_of_one_node_is_never_cut_off(pair: Pair) -> None:
    pair.host.begin_round(StartRound(RoundId(1, 0, 2), 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 3))
    pair.other.end_round()
    lose(pair.host)
    await pair.until(lambda: pair.host.next_check is None)
    assert pair.cut.empty()


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
    stranger.begin_round(StartRound(RoundId(1, 0, 1), 1, 2, 1, 2, 1, 2, "127.0.0.1", pair.port, 0, 3))
    await pair.until(lambda: pair.server.counters.dropped["refused-link"] > 0)
    assert len(pair.host.links) == 1
    stranger.end_round()


# ---- more than half of a round's nodes -------------------------------------------------------------------------------


class Group:
    """The node that hosts the store of a round of four nodes, and the monitors of the others, by group rank."""

    def __init__(self, pair: Pair) -> None:
        self.cut: asyncio.Queue[int] = asyncio.Queue()
        self.nodes = [ReachabilityMonitor("run", KEY, SHORT, partial(self.cut.put_nowait, rank)) for rank in range(4)]
        self.host, self.server, self.until = self.nodes[0], pair.server, pair.until
        self.start = StartRound(RoundId(1, 0, 1), 0, 4, 0, 4, 0, 4, "127.0.0.1", pair.port, 0, 3)
        self.server.serve_link = self.host.gate().accept

    async def connect(self) -> None:
        for rank, node in enumerate(self.nodes):
            reach(node)
            node.begin_round(replace(self.start, group_rank=rank))
        await self.until(lambda: len(self.host.links) == 3 and all(n.round_store_link for n in self.nodes[1:]))

    async def end(self, *ranks: int) -> None:
        """End these nodes."""
        for rank in ranks:
            self.nodes[rank].end_round()
        await self.until(lambda: not {(self.start.round, rank) for rank in ranks} & self.host.links.keys())

    def lose_coordinator(self, *ranks: int) -> None:
        for rank in ranks:
            lose(self.nodes[rank])

    async def next_cut(self) -> int:
        return await asyncio.wait_for(self.cut.get(), 10)


@pytest.fixture
async def group(pair: Pair) -> AsyncIterator[Group]:
    group = Group(pair)
    await group.connect()
    yield group
    for node in group.nodes:
        node.end_round()


async def test_group_rank_0_without_more_than_half_of_the_nodes_is_cut_off(group: Group) -> None:
    group.lose_coordinator(0)
    await group.end(3)
    await group.until(lambda: now() > group.host.start_until)
    await group.until(lambda: group.host.next_check is not None and group.host.next_check.when() > now())
    assert group.cut.empty()  # three of four nodes
    await group.end(2)
    assert await group.next_cut() == 0


async def test_the_nodes_that_a_cut_off_node_keeps_links_with_are_cut_off_too(group: Group) -> None:
    group.lose_coordinator(0, 1)
    await group.end(2, 3)
    assert await group.next_cut() == 0
    assert await group.next_cut() == 1


@pytest.mark.slow
async def test_a_cut_off_node_accepts_links_once_it_reaches_the_coordinator(group: Group) -> None:
    group.lose_coordinator(0)
    await group.end(2, 3)
    assert await group.next_cut() == 0
    await group.until(lambda: not group.host.links and not group.nodes[1].round_store_link)
    # Group rank 1 tries again, and is refused.
    await group.until(lambda: group.nodes[1].round_store_link is not None)
    await group.until(lambda: not group.host.links and not group.nodes[1].round_store_link)
    reach(group.host)
    await group.until(lambda: bool(group.host.links))
    assert group.cut.empty()  # group rank 1 reached the coordinator all the time


async def test_a_node_that_connects_twice_counts_once(group: Group) -> None:
    key = (group.start.round, 1)
    first = group.host.links[key]
    twin = ReachabilityMonitor("run", KEY, SHORT, lambda: None)
    twin.begin_round(replace(group.start, group_rank=1))
    await group.until(lambda: group.host.links[key] is not first)
    group.lose_coordinator(0)
    await group.end(2, 3)
    assert await group.next_cut() == 0
    twin.end_round()


async def test_a_link_of_another_round_does_not_count(group: Group) -> None:
    group.host.begin_round(replace(group.start, round=RoundId(1, 0, 2)))
    group.lose_coordinator(0)
    assert await group.next_cut() == 0


async def test_a_node_whose_first_link_does_not_come_up_is_cut_off(pair: Pair) -> None:
    await pair.server.close()
    pair.other.begin_round(StartRound(RoundId(1, 0, 2), 1, 2, 1, 2, 1, 2, "127.0.0.1", 1, 0, 3))
    pair.other.coordinator_link_changed(None)
    assert await asyncio.wait_for(pair.cut.get(), 10) == "other"


async def test_a_node_that_begins_a_round_without_the_coordinator_has_time_for_its_first_link(pair: Pair) -> None:
    lose(pair.host)
    lose(pair.other)
    await pair.until(lambda: now() > pair.other.start_until)
    await pair.connect(2)
    assert pair.cut.empty()
    await pair.goes_on(pair.host, pair.other)


@pytest.mark.parametrize(
    ("size", "linked", "allowed"),
    [(1, (), True), (2, (), False), (2, (1,), True), (3, (2,), True), (4, (1,), False), (4, (1, 3), True)],
)
def test_group_rank_0_may_write_alone_with_more_than_half(size: int, linked: tuple[int, ...], allowed: bool) -> None:
    assert permission_end(0, size, nodes=dict.fromkeys(linked, 7.0)) == (
        math.inf if size == 1 else 7.0 if allowed else -math.inf
    )


def test_other_nodes_may_write_alone_while_group_rank_0_keeps_their_link() -> None:
    assert permission_end(1, 4, nodes={0: 7.0}) == 7.0
    assert permission_end(1, 4) == -math.inf


@pytest.mark.parametrize(
    ("coordinator", "ages", "end"),
    [(5.0, {1: 9.0, 2: 7.0, 3: 8.0}, 8.0), (8.5, {1: 9.0, 2: 7.0, 3: 8.0}, 8.5), (5.0, {3: 8.0}, 5.0)],
)
def test_permission_ends_with_the_last_of_the_coordinator_and_a_majority(
    coordinator: float, ages: dict[int, float], end: float
) -> None:
    assert permission_end(0, 4, coordinator, ages) == end
