"""A node's side of the control link, against scripted stores and without real delays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from elasticjob.contract.messages import (
    Announce,
    CoordinatorToNode,
    Message,
    NewerStore,
    Ready,
    Report,
    RoundPhase,
    Standby,
)
from elasticjob.control_link.link import ControlLink, LinkRefused, Welcome
from elasticjob.control_link.node_client import NoCoordinatorError, NodeClient

ANNOUNCE = Announce(0, 0, "agent_id", "pod", "10.0.0.1", 1, 1)


class FakeLink:
    """A link to a store that sends some messages and then closes."""

    def __init__(self, incarnation: int, *messages: Message) -> None:
        self.welcome = Welcome("run", 1, incarnation)
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
    on_message: Callable[[CoordinatorToNode], None] = lambda _: None,
) -> None:
    """Run a node until the scripted connection attempts are used up."""

    async def dial() -> ControlLink:
        if not dials:
            raise asyncio.CancelledError
        if isinstance(link := dials.pop(0), Exception):
            raise link
        return cast("ControlLink", link)

    node = NodeClient(
        dial, lambda: (ANNOUNCE, Ready()), on_message, had_round=lambda: had_round, join_timeout=0.0, jitter=lambda: 1.0
    )
    with pytest.raises(asyncio.CancelledError):
        await node.run()


async def test_each_connection_begins_with_the_greeting_and_other_roles_messages_are_ignored(
    delays: list[float],
) -> None:
    report: Any = Report(0, RoundPhase.GATHERING, "", None, 0, 0, 0.0)
    links = [FakeLink(0, Standby("a")), FakeLink(0, report, Standby("b"))]
    received: list[CoordinatorToNode] = []
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
    """The store is down for a minute; the node tries at least once a second and then sends its greeting as usual."""
    failures = [ConnectionRefusedError() for _ in range(70)]
    store = FakeLink(1)
    await run([FakeLink(0), *failures, store])
    assert sum(delays) > 60
    assert max(delays) == 1.0
    assert store.sent == [ANNOUNCE, Ready()]
