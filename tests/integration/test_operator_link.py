"""The operator's link to a real store with its coordinator, over a socket on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import pytest

from elasticjob._runtime.contract.messages import (
    Announce,
    ExpectedPod,
    OperatorView,
    PodState,
    RoundPhase,
    RoundSettings,
    StartRound,
)
from elasticjob._runtime.control_link.link import ControlLink, LinkGate, LinkRole, Welcome, connect
from elasticjob._runtime.rendezvous.state import initial_state
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store_pod.coordinator import Coordinator
from elasticjob_operator.links.store_links import StoreLinks
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.plan import StoreAddress
from elasticjob_operator.reconcile.keys import JobKeys

KEY = ("ns", "bert")
SETTINGS = RoundSettings(min_nodes=1, max_nodes=2, target=1)
KEYS = JobKeys(b"m" * 32)
POD = ExpectedPod(0, 0, "bert-0-0", PodState.RUNNING)


@dataclass
class Store:
    """A store with its coordinator, as `elasticjob store` runs it."""

    server: StoreServer
    coordinator: Coordinator
    port: int = 0

    @property
    def address(self) -> StoreAddress:
        return StoreAddress("bert-rdzv-0", "127.0.0.1", self.port, "uid", 1, 0, (1.0, 3))


async def start_store(port: int = 0) -> Store:
    coordinator = Coordinator(initial_state(SETTINGS, attempt=1, store=0, now=time.monotonic()))
    roles = {LinkRole.AGENT: NODE_KEY, LinkRole.OPERATOR: OPERATOR_KEY}
    keys = {role: KEYS.derive(name, "uid", 1) for role, name in roles.items()}
    server = StoreServer(links=LinkGate(Welcome("uid", 1, 0), keys, coordinator.serve).accept)
    store = Store(server, coordinator)
    store.port = await server.start("127.0.0.1", port)
    coordinator.start()
    return store


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = await start_store()
    yield store
    store.coordinator.stop()
    await store.server.close()


@pytest.fixture
async def links() -> AsyncIterator[StoreLinks]:
    links = StoreLinks(lambda key: None, lambda: 3)
    yield links
    await links.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 60 s"
        await asyncio.sleep(0.01)


async def announce(port: int) -> ControlLink:
    """Connect a node and announce it."""
    key = KEYS.derive(NODE_KEY, "uid", 1)
    node = await connect("127.0.0.1", port, role=LinkRole.AGENT, key=key, run_id="uid")
    node.send(Announce(0, 0, "agent_id", "bert-0-0", "127.0.0.1", 1, 1))
    return node


async def test_the_view_reaches_the_coordinator_and_reports_reach_the_operator(store: Store, links: StoreLinks) -> None:
    links.set_address(KEY, store.address, KEYS.derive(OPERATOR_KEY, "uid", 1))
    await until(lambda: links.view(KEY).connected)
    links.set_operator_view(KEY, OperatorView(0, 0, SETTINGS, charged=2, charged_round=None, pods=(POD,)))
    node = await announce(store.port)
    message = await node.receive()
    while not isinstance(message, StartRound):
        message = await node.receive()
    assert message.restarts == 2
    await until(lambda: (r := links.view(KEY).report) is not None and r.phase is RoundPhase.RUNNING)
    node.close()
    await until(lambda: "bert-0-0" in links.view(KEY).lost_pods)
    assert store.coordinator.state.operator_view.lease == 3


async def test_a_restarted_store_receives_the_view_again(links: StoreLinks) -> None:
    first = await start_store()
    links.set_address(KEY, first.address, KEYS.derive(OPERATOR_KEY, "uid", 1))
    links.set_operator_view(KEY, OperatorView(0, 0, SETTINGS, charged=1, charged_round=None, pods=(POD,)))
    await until(lambda: first.coordinator.state.operator_seen)
    first.coordinator.stop()
    await first.server.close()
    await until(lambda: not links.view(KEY).connected)
    second = await start_store(first.port)
    await until(lambda: second.coordinator.state.operator_seen)
    assert second.coordinator.state.operator_view.charged == 1
    second.coordinator.stop()
    await second.server.close()


async def test_a_wrong_key_is_refused(store: Store, links: StoreLinks) -> None:
    links.set_address(KEY, store.address, KEYS.derive(NODE_KEY, "uid", 1))
    await until(lambda: sum(store.server.counters.dropped.values()) > 0)
    assert links.view(KEY).connected is False
    await until(lambda: "the peer has the wrong key for role operator" in links.view(KEY).refused)


async def test_a_store_takes_the_views_of_an_operator_whose_lease_begins_anew(store: Store, links: StoreLinks) -> None:
    key = KEYS.derive(OPERATOR_KEY, "uid", 1)
    links.set_address(KEY, store.address, key)
    links.set_operator_view(KEY, OperatorView(0, 0, SETTINGS, charged=1, charged_round=None, pods=(POD,)))
    await until(lambda: store.coordinator.state.operator_view.charged == 1)
    for charged, generation in ((2, 1), (3, 3), (4, 0)):
        successor = StoreLinks(lambda key: None, partial(int, generation), raise_after=0.0)
        successor.set_address(KEY, store.address, key)
        successor.set_operator_view(KEY, OperatorView(0, 0, SETTINGS, charged=charged, charged_round=None, pods=(POD,)))
        await until(partial(_is_charged, store, charged))
        await successor.close()


def _is_charged(store: Store, restarts: int) -> bool:
    return store.coordinator.state.operator_view.charged == restarts
