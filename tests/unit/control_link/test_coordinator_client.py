"""An agent's side of the control link, against scripted stores and without real delays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from elasticjob._runtime.contract.messages import (
    Announce,
    CoordinatorToAgent,
    Message,
    NewerStore,
    Ready,
    Report,
    RoundPhase,
    Standby,
    StandbyStore,
    StoreActive,
)
from elasticjob._runtime.control_link.coordinator_client import CoordinatorClient, NoCoordinatorError
from elasticjob._runtime.control_link.link import ControlLink, LinkRefused, Welcome

ANNOUNCE = Announce(0, 0, "agent_id", "pod", "10.0.0.1", 1, 1)


class FakeLink:
    """A link to a store that sends some messages and then closes."""

    def __init__(self, incarnation: int, *messages: Message, passive: bool = False) -> None:
        self.welcome = Welcome("run", 1, incarnation, passive)
        self.sent: list[Message] = []
        self.closed = False
        self.lost_by_keep_alive = False
        self._messages = list(messages)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    async def receive(self) -> Message | None:
        return self._messages.pop(0) if self._messages else None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Requested delays; sleeps return at once."""
    requested: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        requested.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return requested


async def run(
    dials: list[FakeLink | Exception],
    *,
    had_round: bool = True,
    on_message: Callable[[CoordinatorToAgent], None] = lambda _: None,
) -> None:
    """Run an agent until the scripted connection attempts are used up."""

    async def dial() -> ControlLink:
        if not dials:
            raise asyncio.CancelledError
        if isinstance(link := dials.pop(0), Exception):
            raise link
        return cast("ControlLink", link)

    node = CoordinatorClient(
        dial, lambda: (ANNOUNCE, Ready()), on_message, had_round=lambda: had_round, join_timeout=0.0, jitter=lambda: 1.0
    )
    with pytest.raises(asyncio.CancelledError):
        await node.run()


async def test_each_connection_begins_with_the_greeting_and_other_roles_messages_are_ignored(
    delays: list[float],
) -> None:
    report: Any = Report(0, RoundPhase.GATHERING, "", None, 0, 0, 0.0)
    links = [FakeLink(0, Standby("a")), FakeLink(0, report, Standby("b"))]
    received: list[CoordinatorToAgent] = []
    await run(list(links), on_message=received.append)
    assert [link.sent for link in links] == [[ANNOUNCE, Ready()]] * 2
    assert received == [Standby("a"), Standby("b")]
    assert all(link.closed for link in links)


async def test_the_backoff_doubles_to_a_second_and_restarts_after_a_connection(delays: list[float]) -> None:
    refused = [ConnectionRefusedError() for _ in range(6)]
    await run([*refused, FakeLink(0), ConnectionRefusedError()])
    assert delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 0.05, 0.1]


async def test_an_older_store_is_sent_newer_store_and_nothing_else(delays: list[float]) -> None:
    old = FakeLink(1)
    await run([FakeLink(2), old, FakeLink(2)])
    assert old.sent == [NewerStore(2)]
    assert old.closed


@pytest.mark.parametrize("error", [ConnectionRefusedError("no"), TimeoutError("no"), LinkRefused("no")])
async def test_a_node_without_a_round_gives_up_with_the_reason(delays: list[float], error: Exception) -> None:
    with pytest.raises(NoCoordinatorError, match="no"):
        await run([error, FakeLink(0)], had_round=False)


async def test_a_node_that_had_a_round_reconnects_without_limit(delays: list[float]) -> None:
    """The store is down for a minute; the agent tries at least once a second and then sends its greeting as usual."""
    failures = [ConnectionRefusedError() for _ in range(70)]
    store = FakeLink(1)
    await run([FakeLink(0), *failures, store])
    assert sum(delays) > 60
    assert max(delays) == 1.0
    assert store.sent == [ANNOUNCE, Ready()]


# ---- with a standby store

STANDBY = StandbyStore(1, "10.0.0.9", 29400)


class OpenLink(FakeLink):
    """A link that stays open: the test sends messages, and closes it with None."""

    def __init__(self, incarnation: int, *, passive: bool = False) -> None:
        super().__init__(incarnation, passive=passive)
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive(self) -> Message | None:
        return await self.messages.get()

    def close(self) -> None:
        super().close()
        self.messages.put_nowait(None)


class Stores:
    """A store and a standby store. Each accepts with the link that the test has prepared, and else refuses."""

    def __init__(self) -> None:
        self.links: dict[str, OpenLink | None] = {"store": None, "standby": None}
        self.dialed: list[str] = []
        self.received: list[CoordinatorToAgent] = []
        self.changes: list[bool] = []
        self.node = CoordinatorClient(
            lambda: self.accept("store"), lambda: (ANNOUNCE,), self.received.append, had_round=lambda: True,
            join_timeout=0.0, on_link_change=lambda link: self.changes.append(link is not None), jitter=lambda: 0.0,
            dial_standby=lambda address: self.accept("standby" if address == STANDBY else "?"),
        )  # fmt: skip
        self.running = asyncio.ensure_future(self.node.run())

    async def accept(self, name: str) -> ControlLink:
        self.dialed.append(name)
        link = self.links[name]
        if link is None or link.closed:
            raise ConnectionRefusedError
        return cast("ControlLink", link)

    def serve(self, name: str, incarnation: int, *, passive: bool = False) -> OpenLink:
        link = self.links[name] = OpenLink(incarnation, passive=passive)
        return link


@pytest.fixture
async def stores() -> AsyncIterator[Stores]:
    """An agent that is connected to store 0 and knows the standby store."""
    found = Stores()
    first = found.serve("store", 0)
    first.messages.put_nowait(STANDBY)
    await until(lambda: bool(found.changes) and first.messages.empty())
    yield found
    found.running.cancel()
    await asyncio.gather(found.running, return_exceptions=True)


async def until(met: Callable[[], bool]) -> None:
    for _ in range(5000):
        if met():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition was not met")


def lose_store(stores: Stores) -> None:
    link = stores.links["store"]
    assert link is not None
    link.closed = True
    link.messages.put_nowait(None)


async def test_a_node_that_loses_its_store_announces_itself_at_the_standby_store_and_waits(stores: Stores) -> None:
    standby = stores.serve("standby", 1, passive=True)
    lose_store(stores)
    await until(lambda: bool(standby.sent))
    assert standby.sent == [ANNOUNCE]
    assert stores.changes == [True, False]
    stores.node.send(Ready())
    assert standby.sent == [ANNOUNCE, Ready()]
    standby.messages.put_nowait(StoreActive())
    await until(lambda: stores.changes == [True, False, True])
    standby.messages.put_nowait(Standby("a"))
    await until(lambda: stores.received == [Standby("a")])
    assert standby.sent == [ANNOUNCE, Ready()]


async def test_a_node_whose_store_vanished_says_so(stores: Stores) -> None:
    standby, link = stores.serve("standby", 1, passive=True), stores.links["store"]
    assert link is not None
    link.lost_by_keep_alive = True
    lose_store(stores)
    await until(lambda: bool(standby.sent))
    assert standby.sent == [replace(ANNOUNCE, store_vanished=True)]


async def test_a_node_at_a_passive_store_returns_to_the_store_that_answers(stores: Stores) -> None:
    standby = stores.serve("standby", 1, passive=True)
    lose_store(stores)
    await until(lambda: bool(standby.sent))
    again = stores.serve("store", 0)
    await until(lambda: stores.changes == [True, False, True])
    assert standby.closed
    assert again.sent == [ANNOUNCE]  # and not NewerStore: a passive store does not count


async def test_a_store_that_answers_at_once_leaves_the_standby_store_alone(stores: Stores) -> None:
    stores.serve("standby", 1, passive=True)
    link = stores.links["store"]
    assert link is not None
    stores.serve("store", 0)
    link.messages.put_nowait(None)
    await until(lambda: stores.changes == [True, False, True])
    assert "standby" not in stores.dialed


async def test_after_the_takeover_the_old_store_is_sent_newer_store(stores: Stores) -> None:
    standby = stores.serve("standby", 1, passive=True)
    lose_store(stores)
    await until(lambda: bool(standby.sent))
    standby.messages.put_nowait(StoreActive())
    await until(lambda: stores.changes[-1])
    old = stores.serve("store", 0)
    standby.closed = True
    standby.messages.put_nowait(None)
    await until(lambda: bool(old.sent))
    assert old.sent == [NewerStore(1)]


async def test_an_active_standby_store_gets_the_node_like_any_other(stores: Stores) -> None:
    standby = stores.serve("standby", 1)
    lose_store(stores)
    await until(lambda: stores.changes == [True, False, True])
    assert standby.sent == [ANNOUNCE]
