"""Control links: what is said, when it is said again, and what is remembered. The stores are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from elasticjob.contract.messages import Message, OperatorView, Report, RoundSettings
from elasticjob.control_link.link import LinkRefused, Welcome
from elasticjob_operator import store_links as links_module
from elasticjob_operator.plan import StoreAddress
from elasticjob_operator.store_links import LinkConnection, StoreLinks
from support.operator_build import gathering, report, worker

KEY = ("ns", "bert")
ADDRESS = StoreAddress("bert-rdzv-0", "10.0.0.1", 29400, "uid", 1, 0, (1.0, 3))
FACTS = OperatorView(0, 0, RoundSettings(1, 2, 2), charged=0, charged_round=None)


class FakeWire:
    """One end of a link, whose other end is the test."""

    def __init__(self, incarnation: int = 0) -> None:
        self.welcome = Welcome("uid", 1, incarnation)
        self.said: list[Message] = []
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self.closed = False
        self.lost_by_keep_alive = False

    def send(self, message: Message) -> None:
        self.said.append(message)

    async def receive(self) -> Message | None:
        return await self.inbox.get()

    def close(self) -> None:
        self.closed = True


class Stores:
    """Gives out the prepared wires one after the other; refuses where there is none."""

    def __init__(self) -> None:
        self.wires: list[FakeWire] = []
        self.asked: list[StoreAddress] = []
        self.now = 100.0
        self.poked: list[tuple[str, str]] = []
        self.links = StoreLinks(self.poked.append, lambda: 7, self.connect, lambda: self.now)

    async def connect(self, address: StoreAddress, key: bytes) -> LinkConnection:
        self.asked.append(address)
        if not self.wires:
            raise LinkRefused("not yet")
        return self.wires.pop(0)

    async def until(self, met: object) -> None:
        """Let tasks run until `met()` holds."""
        assert callable(met)
        for _ in range(500):
            if met():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")


@pytest.fixture
async def stores(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stores]:
    monkeypatch.setattr(links_module, "FIRST_BACKOFF", 0.0)
    monkeypatch.setattr(links_module, "LONGEST_BACKOFF", 0.0)
    found = Stores()
    yield found
    await found.links.close()


async def connected(stores: Stores, said: Report) -> FakeWire:
    wire = FakeWire()
    stores.wires.append(wire)
    stores.links.set_address(KEY, ADDRESS, b"k")
    wire.inbox.put_nowait(said)
    await stores.until(lambda: stores.links.view(KEY).connected)
    return wire


async def test_it_tries_until_the_store_answers_and_counts_from_its_first_report(stores: Stores) -> None:
    stores.links.set_address(KEY, ADDRESS, b"k")
    await stores.until(lambda: len(stores.asked) > 3)
    assert stores.links.view(KEY).connected is False
    wire = FakeWire()
    stores.wires.append(wire)
    stores.now = 105.0
    wire.inbox.put_nowait(gathering())
    await stores.until(lambda: stores.links.view(KEY).connected)
    assert stores.links.view(KEY).since == 105.0
    assert stores.poked[-1] == KEY


async def test_facts_are_said_once_with_growing_numbers_and_again_on_a_new_link(stores: Stores) -> None:
    wire = await connected(stores, gathering())
    stores.links.set_view(KEY, FACTS)
    stores.links.set_view(KEY, replace(FACTS))
    stores.links.set_view(KEY, replace(FACTS, charged=1))
    assert [(f.lease, f.charged) for f in wire.said if isinstance(f, OperatorView)] == [(7, 0), (7, 1)]
    again = FakeWire()
    stores.wires.append(again)
    wire.inbox.put_nowait(None)
    await stores.until(lambda: again.said)
    numbers = [f.sequence for f in (*wire.said, *again.said) if isinstance(f, OperatorView)]
    assert numbers == sorted(set(numbers))
    assert [f.charged for f in again.said if isinstance(f, OperatorView)] == [1]


async def test_the_last_report_outlives_the_link_and_lost_nodes_do_not(stores: Stores) -> None:
    said = report(worker(0), lost_pods=("bert-1-0",))
    wire = await connected(stores, said)
    stores.now = 110.0
    wire.inbox.put_nowait(replace(said, lost_pods=("bert-1-0", "bert-2-0")))
    await stores.until(lambda: len(stores.links.view(KEY).lost_pods) == 2)
    assert stores.links.view(KEY).lost_pods == {"bert-1-0": 100.0, "bert-2-0": 110.0}
    wire.inbox.put_nowait(None)
    await stores.until(lambda: not stores.links.view(KEY).connected)
    view = stores.links.view(KEY)
    assert (view.since, dict(view.lost_pods), view.report is not None) == (110.0, {}, True)
    assert wire.closed


async def test_a_new_store_gets_a_new_link_and_the_old_one_is_closed(stores: Stores) -> None:
    wire = await connected(stores, gathering())
    stores.links.set_view(KEY, FACTS)
    newer = FakeWire(incarnation=1)
    stores.wires.append(newer)
    stores.links.set_address(KEY, replace(ADDRESS, pod="bert-rdzv-1", incarnation=1), b"k")
    assert wire.closed
    assert stores.links.view(KEY).connected is False
    await stores.until(lambda: newer.said)
    stores.links.set_address(KEY, None, b"")
    assert newer.closed


async def test_a_peer_that_vanished_was_last_heard_of_when_keep_alive_began_to_wait(stores: Stores) -> None:
    wire = await connected(stores, gathering())
    stores.now, wire.lost_by_keep_alive = 110.0, True
    wire.inbox.put_nowait(None)
    await stores.until(lambda: not stores.links.view(KEY).connected)
    assert stores.links.view(KEY).since == 107.0


async def test_what_the_store_before_said_last_is_known_while_its_successor_serves(stores: Stores) -> None:
    last = report(worker(0))
    await connected(stores, last)
    newer = FakeWire(incarnation=1)
    stores.wires.append(newer)
    stores.links.set_address(KEY, replace(ADDRESS, pod="bert-rdzv-1", incarnation=1), b"k")
    assert stores.links.view(KEY).previous_report is None
    for said in (gathering(incarnation=1), gathering(worker(0), incarnation=1)):
        newer.inbox.put_nowait(said)
        await stores.until(lambda said=said: stores.links.view(KEY).report == said)
        assert stores.links.view(KEY).previous_report == last


async def test_a_store_of_another_incarnation_is_not_listened_to(stores: Stores) -> None:
    wire = FakeWire(incarnation=5)
    stores.wires.append(wire)
    stores.links.set_address(KEY, ADDRESS, b"k")
    wire.inbox.put_nowait(gathering())
    await stores.until(lambda: wire.closed)
    assert stores.links.view(KEY).connected is False
    assert wire.said == []


async def test_a_job_that_is_gone_has_no_link(stores: Stores) -> None:
    wire = await connected(stores, gathering())
    stores.links.forget(KEY)
    assert wire.closed
    assert stores.links.view(KEY).report is None
    stores.links.set_view(KEY, FACTS)
    assert wire.said == []
