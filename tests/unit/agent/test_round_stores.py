"""Which process-group stores an agent closes, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from elasticjob._runtime.agent.round_stores import RoundStores
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.connections import Peer
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Op


class SlowStore(StoreServer):
    """A store with one link, which ends only once `may_end` is set."""

    def __init__(self) -> None:
        super().__init__(links=self._serve)
        self.may_end = asyncio.Event()
        self.ends = asyncio.Event()
        self.linked = asyncio.Event()
        self.port = 0

    async def _serve(self, _peer: Peer, _version: int, _data: bytes) -> None:
        self.linked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ends.set()
            await self.may_end.wait()

    async def is_open(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionRefusedError:
            return False
        writer.close()
        return True


async def started(*, with_link: bool = False) -> SlowStore:
    store = SlowStore()
    store.port = await store.start("127.0.0.1")
    if with_link:
        _, writer = await asyncio.open_connection("127.0.0.1", store.port)
        writer.write(wire.request(Op.LINK, number=1))
        await asyncio.wait_for(store.linked.wait(), 10)
    return store


@pytest.fixture
async def stores() -> AsyncIterator[RoundStores]:
    found = RoundStores()
    yield found
    await found.close()


async def test_a_round_that_ends_while_older_stores_close_keeps_its_store(stores: RoundStores) -> None:
    """Its nodes use it until they have stopped, and the store of the next round is there by then."""
    last, running, following = await started(with_link=True), await started(), await started()
    stores.add(last)
    stores.add(running)
    closing = asyncio.ensure_future(stores.close_older(running))
    await asyncio.wait_for(last.ends.wait(), 10)
    stores.add(following)
    last.may_end.set()
    await closing
    assert [await store.is_open() for store in (last, running, following)] == [False, True, True]
    assert (stores.oldest, stores.newest) == (running, following)


async def test_a_late_start_of_a_round_closes_no_store_of_a_later_one(stores: RoundStores) -> None:
    older, newer = await started(), await started()
    stores.add(older)
    stores.add(newer)
    await stores.close_older(newer)
    await stores.close_older(older)
    assert [await store.is_open() for store in (older, newer)] == [False, True]
