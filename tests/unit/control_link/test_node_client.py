"""A node's side of the link against scripted stores; the clock is not waited for."""

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
    """A store that says its lines and then closes."""

    def __init__(self, incarnation: int, *lines: Message) -> None:
        self.welcome = Welcome("run", 1, incarnation)
        self.sent: list[Message] = []
        self.closed = False
        self.lost_by_keep_alive = False
        self._lines = list(lines)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    async def receive(self) -> Message | None:
        return self._lines.pop(0) if self._lines else None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Delays asked for; none is waited."""
    delays: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return delays


async def run(
    dials: list[FakeLink | Exception],
    *,
    had_round: bool = True,
    hear: Callable[[CoordinatorToNode], None] = lambda _: None,
) -> None:
    """Run a node until the scripted dials are used up."""

    async def dial() -> ControlLink:
        if not dials:
            raise asyncio.CancelledError
        if isinstance(link := dials.pop(0), Exception):
            raise link
        return cast("ControlLink", link)

    node = NodeClient(
        dial, lambda: (ANNOUNCE, Ready()), hear, had_round=lambda: had_round, join_timeout=0.0, jitter=lambda: 1.0
    )
    with pytest.raises(asyncio.CancelledError):
        await node.run()


async def test_each_connection_begins_with_the_greeting_and_only_words_for_nodes_are_heard(slept: list[float]) -> None:
    report: Any = Report(0, RoundPhase.GATHERING, "", None, 0, 0, 0.0)
    links = [FakeLink(0, Standby("a")), FakeLink(0, report, Standby("b"))]
    heard: list[CoordinatorToNode] = []
    await run(list(links), hear=heard.append)
    assert [link.sent for link in links] == [[ANNOUNCE, Ready()]] * 2
    assert heard == [Standby("a"), Standby("b")]
    assert all(link.closed for link in links)


async def test_the_delay_doubles_to_a_second_and_starts_again_after_a_link(slept: list[float]) -> None:
    refused = [ConnectionRefusedError() for _ in range(6)]
    await run([*refused, FakeLink(0), ConnectionRefusedError()])
    assert slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 0.05, 0.1]


async def test_an_older_store_hears_of_the_newest_and_nothing_else(slept: list[float]) -> None:
    old = FakeLink(1)
    await run([FakeLink(2), old, FakeLink(2)])
    assert old.sent == [NewerStore(2)]
    assert old.closed


@pytest.mark.parametrize("error", [ConnectionRefusedError("no"), TimeoutError("no"), LinkRefused("no")])
async def test_without_a_round_it_gives_up_and_says_why(slept: list[float], error: Exception) -> None:
    with pytest.raises(NoCoordinatorError, match="no"):
        await run([error, FakeLink(0)], had_round=False)


async def test_who_had_a_round_looks_for_the_store_for_as_long_as_it_takes(slept: list[float]) -> None:
    """A minute, and every second of it; then it says the same as ever."""
    away = [ConnectionRefusedError() for _ in range(70)]
    back = FakeLink(1)
    await run([FakeLink(0), *away, back])
    assert sum(slept) > 60
    assert max(slept) == 1.0
    assert back.sent == [ANNOUNCE, Ready()]
