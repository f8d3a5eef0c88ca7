"""The coordinator over real links: rounds reach nodes, reports reach the operator, strangers reach nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest

from elasticjob.contract.messages import (
    Announce,
    EndReason,
    EndRound,
    ExpectedPod,
    Finish,
    Leaving,
    Message,
    OperatorView,
    Outcome,
    PodState,
    Ready,
    Report,
    RoundPhase,
    RoundSettings,
    Standby,
    StartRound,
    StepTimes,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.control_link.link import ControlLink, LinkGate, LinkRole, Welcome, connect
from elasticjob.rendezvous.state import initial_state
from elasticjob.store.server import StoreServer
from elasticjob.store_pod.coordinator import Coordinator

KEYS = {LinkRole.NODE: b"n" * 32, LinkRole.OPERATOR: b"o" * 32}
SETTINGS = RoundSettings(min_nodes=1, max_nodes=2, target=2)
M = TypeVar("M", bound=Message)


class Peers:
    """A coordinator on loopback, and links to it."""

    def __init__(self, port: int, coordinator: Coordinator) -> None:
        self.port = port
        self.coordinator = coordinator

    async def link(self, role: LinkRole = LinkRole.NODE) -> ControlLink:
        return await connect("127.0.0.1", self.port, role=role, key=KEYS[role], run_id="r")

    async def node(self, index: int) -> ControlLink:
        link = await self.link()
        link.send(Announce(index, 0, f"agent_id-{index}", f"j-{index}-0", "127.0.0.1", 5000 + index, 1, ready=True))
        return link


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    now = asyncio.get_running_loop().time()
    coordinator = Coordinator(initial_state(SETTINGS, attempt=1, store=0, now=now))
    server = StoreServer(links=LinkGate(Welcome("r", 1, 0), KEYS, coordinator.serve).accept)
    port = await server.start("127.0.0.1")
    coordinator.start()
    yield Peers(port, coordinator)
    coordinator.stop()
    await server.close()


async def heard(link: ControlLink, kind: type[M], until: Callable[[M], bool] = lambda _: True) -> M:
    """The next message of a kind that is as wanted."""
    while True:
        message = await asyncio.wait_for(link.receive(), 10)
        assert message is not None, f"closed while waiting for {kind.__name__}"
        if isinstance(message, kind) and until(message):
            return message


async def test_a_job_from_first_announcement_to_success(peers: Peers) -> None:
    operator = await peers.link(LinkRole.OPERATOR)
    nodes = [await peers.node(index) for index in range(2)]
    starts = [await heard(node, StartRound) for node in nodes]
    assert [s.rank for s in starts] == [0, 1]
    for node, start in zip(nodes, starts, strict=True):
        node.send(WorkersStarted(start.round))
    assert (await heard(operator, Report, lambda r: r.formed_at > 0)).world_size == 2
    for node, start in zip(nodes, starts, strict=True):
        node.send(WorkersSucceeded(start.round))
    for node in nodes:
        assert (await heard(node, Finish)).outcome is Outcome.SUCCEEDED
    assert (await heard(operator, Report, lambda r: r.phase is RoundPhase.FINISHED)).outcome is Outcome.SUCCEEDED


async def test_a_closed_link_ends_the_round_of_the_others(peers: Peers) -> None:
    operator = await peers.link(LinkRole.OPERATOR)
    nodes = [await peers.node(index) for index in range(2)]
    start = await heard(nodes[0], StartRound)
    pods = tuple(ExpectedPod(s, 0, f"j-{s}-0", PodState.RUNNING) for s in range(2))
    operator.send(OperatorView(1, 1, SETTINGS, 0, None, pods))
    nodes[1].close()
    assert "j-1-0 lost" in (await heard(nodes[0], EndRound)).reason
    nodes[0].send(WorkersStopped(start.round, 6000))
    asks = (await heard(operator, Report, lambda r: r.confirmation_request > 0)).confirmation_request
    operator.send(OperatorView(1, 2, SETTINGS, 0, None, pods, confirmed_request=asks))
    assert (await heard(nodes[0], StartRound)).world_size == 1
    report = await heard(operator, Report, lambda r: bool(r.ended_rounds) and not r.confirmation_request)
    assert (report.ended_rounds[0].reason, report.lost_pods) == (EndReason.AGENT_LOST, ("j-1-0",))


async def test_an_end_that_only_the_operator_knows_of_reaches_who_is_still_here(peers: Peers) -> None:
    node = await peers.node(0)
    operator = await peers.link(LinkRole.OPERATOR)
    await heard(operator, Report, lambda r: bool(r.nodes))
    operator.send(OperatorView(1, 1, SETTINGS, 0, None, finish=Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")))
    assert await heard(node, Finish) == Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")
    assert (await heard(operator, Report, lambda r: r.outcome is not None)).phase is RoundPhase.FINISHED
    assert (await heard(await peers.node(1), Finish)).outcome is Outcome.SUCCEEDED


async def test_reports_of_changes_that_follow_each_other_are_one(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticjob.store_pod.coordinator.REPORT_PACE", 3600.0)
    operator = await peers.link(LinkRole.OPERATOR)
    node = await peers.node(0)
    await heard(operator, Report, lambda r: bool(r.nodes))
    node.send(Leaving("done"))
    assert (await heard(node, Finish)).outcome is Outcome.LEFT
    await heard(await peers.node(1), Standby)
    peers.coordinator._rested()
    assert [n.index for n in (await heard(operator, Report)).nodes] == [1]


async def test_what_is_not_for_a_peer_to_say_is_dropped_and_counted(peers: Peers) -> None:
    stranger = await peers.link()
    stranger.send(Leaving("never announced"))
    assert await asyncio.wait_for(stranger.receive(), 10) is None
    node = await peers.node(0)
    node.send(OperatorView(99, 1, SETTINGS, 0, None, ()))
    operator = await peers.link(LinkRole.OPERATOR)
    operator.send(Ready())
    await heard(operator, Report, lambda r: bool(r.nodes))
    node.send(Leaving("done"))
    assert (await heard(node, Finish)).outcome is Outcome.LEFT
    assert peers.coordinator.dropped == 3
    assert not peers.coordinator.state.operator_seen


async def test_the_times_of_steps_reach_the_operator_as_a_slow_rank(peers: Peers) -> None:
    operator = await peers.link(LinkRole.OPERATOR)
    alone = RoundSettings(min_nodes=1, max_nodes=2, target=1)
    operator.send(OperatorView(1, 1, alone, 0, None, (ExpectedPod(0, 0, "j-0-0", PodState.RUNNING),)))
    node = await peers.link()
    node.send(Announce(0, 0, "agent_id-0", "j-0-0", "127.0.0.1", 5000, 2, ready=True))
    start = await heard(node, StartRound)
    node.send(WorkersStarted(start.round))
    await heard(operator, Report, lambda r: r.formed_at > 0)
    for _ in range(2):
        node.send(StepTimes(start.round, 0.1, (0.02, 0.08)))
    slow = (await heard(operator, Report, lambda r: r.straggler is not None)).straggler
    assert slow is not None
    assert (slow.rank, slow.pod, slow.own_seconds, slow.median_seconds) == (1, "j-0-0", 0.08, 0.02)
    node.send(Leaving("told to go"))
    node.send(WorkersStopped(start.round, 6000))
    assert (await heard(operator, Report, lambda r: r.round is None)).straggler is None


async def test_a_node_that_comes_back_over_a_new_link_has_not_gone(peers: Peers) -> None:
    await peers.node(0)
    again = await peers.node(0)
    other = await peers.node(1)
    assert (await heard(other, StartRound)).world_size == 2
    assert (await heard(again, StartRound)).world_size == 2
