"""The coordinator over real control links to nodes and operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from elasticjob._runtime.contract.messages import (
    Announce,
    EndReason,
    EndRound,
    ExpectedPod,
    Finish,
    LastMembership,
    Leaving,
    MemberState,
    Message,
    Metric,
    OperatorView,
    Outcome,
    PodState,
    Ready,
    Report,
    RoundPhase,
    RoundSettings,
    Standby,
    StartRound,
    StateReceived,
    StepTimes,
    TrainingProgress,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link.link import ControlLink, LinkGate, LinkRole, Welcome, connect
from elasticjob._runtime.rendezvous.state import initial_state
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store_pod import coordinator as coordinator_module
from elasticjob._runtime.store_pod.coordinator import Coordinator

KEYS = {LinkRole.AGENT: b"n" * 32, LinkRole.OPERATOR: b"o" * 32}
SETTINGS = RoundSettings(min_nodes=1, max_nodes=2, target=2)
M = TypeVar("M", bound=Message)


class Peers:
    """A coordinator on loopback, and control links to it."""

    def __init__(self, port: int, coordinator: Coordinator) -> None:
        self.port = port
        self.coordinator = coordinator

    async def link(self, role: LinkRole = LinkRole.AGENT) -> ControlLink:
        return await connect("127.0.0.1", self.port, role=role, key=KEYS[role], run_id="r")

    async def node(self, index: int) -> ControlLink:
        link = await self.link()
        link.send(Announce(index, 0, f"agent_id-{index}", f"j-{index}-0", "127.0.0.1", 5000 + index, 1, ready=True))
        return link

    async def one_node_trains(self, workers: int) -> tuple[ControlLink, ControlLink, RoundId]:
        """Return the links of an operator and of the only node, whose workers have started, and their round."""
        operator = await self.link(LinkRole.OPERATOR)
        one_node = RoundSettings(min_nodes=1, max_nodes=2, target=1)
        operator.send(OperatorView(1, 1, one_node, 0, None, (ExpectedPod(0, 0, "j-0-0", PodState.RUNNING),)))
        node = await self.link()
        node.send(Announce(0, 0, "agent_id-0", "j-0-0", "127.0.0.1", 5000, workers, ready=True))
        round_id = (await receive(node, StartRound)).round
        node.send(WorkersStarted(round_id))
        await receive(operator, Report, lambda r: r.formed_at > 0)
        return operator, node, round_id


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


async def receive(link: ControlLink, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> M:
    """Return the next message of class `kind` for which `condition` holds."""
    while True:
        message = await asyncio.wait_for(link.receive(), 10)
        assert message is not None, f"closed while waiting for {kind.__name__}"
        if isinstance(message, kind) and condition(message):
            return message


async def test_a_job_from_first_announcement_to_success(peers: Peers) -> None:
    operator = await peers.link(LinkRole.OPERATOR)
    nodes = [await peers.node(index) for index in range(2)]
    starts = [await receive(node, StartRound) for node in nodes]
    assert [s.rank for s in starts] == [0, 1]
    for node, start in zip(nodes, starts, strict=True):
        node.send(WorkersStarted(start.round))
    assert (await receive(operator, Report, lambda r: r.formed_at > 0)).world_size == 2
    for node, start in zip(nodes, starts, strict=True):
        node.send(WorkersSucceeded(start.round))
    for node in nodes:
        assert (await receive(node, Finish)).outcome is Outcome.SUCCEEDED
    assert (await receive(operator, Report, lambda r: r.phase is RoundPhase.FINISHED)).outcome is Outcome.SUCCEEDED


async def test_a_member_that_announces_itself_again_over_its_link_is_sent_the_round(peers: Peers) -> None:
    """A node does so that has frozen its workers, once the coordinator answers again."""
    node, other = [await peers.node(index) for index in range(2)]
    start = await receive(node, StartRound)
    for link in (node, other):
        link.send(WorkersStarted(start.round))
    again = Announce(0, 0, "agent_id-0", "j-0-0", "127.0.0.1", 5000, 1, ready=True)
    again = replace(again, membership=LastMembership(start, MemberState.RUNNING))
    node.send(replace(again, agent_id="agent_id-1"))
    node.send(again)
    assert await receive(node, StartRound) == start
    assert peers.coordinator.dropped == 1


async def test_a_closed_link_ends_the_round_of_the_others(peers: Peers) -> None:
    operator = await peers.link(LinkRole.OPERATOR)
    nodes = [await peers.node(index) for index in range(2)]
    start = await receive(nodes[0], StartRound)
    pods = tuple(ExpectedPod(index, 0, f"j-{index}-0", PodState.RUNNING) for index in range(2))
    operator.send(OperatorView(1, 1, SETTINGS, 0, None, pods))
    nodes[1].close()
    assert "j-1-0 lost" in (await receive(nodes[0], EndRound)).reason
    nodes[0].send(WorkersStopped(start.round, 6000))
    requested = (await receive(operator, Report, lambda r: r.confirmation_request > 0)).confirmation_request
    operator.send(OperatorView(1, 2, SETTINGS, 0, None, pods, confirmed_request=requested))
    assert (await receive(nodes[0], StartRound)).world_size == 1
    report = await receive(operator, Report, lambda r: bool(r.ended_rounds) and not r.confirmation_request)
    assert (report.ended_rounds[0].reason, report.lost_pods) == (EndReason.AGENT_LOST, ("j-1-0",))


async def test_an_outcome_known_only_to_the_operator_reaches_connected_nodes(peers: Peers) -> None:
    node = await peers.node(0)
    operator = await peers.link(LinkRole.OPERATOR)
    await receive(operator, Report, lambda r: bool(r.nodes))
    operator.send(OperatorView(1, 1, SETTINGS, 0, None, finish=Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")))
    assert await receive(node, Finish) == Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")
    assert (await receive(operator, Report, lambda r: r.outcome is not None)).phase is RoundPhase.FINISHED
    assert (await receive(await peers.node(1), Finish)).outcome is Outcome.SUCCEEDED


async def test_changes_in_quick_succession_share_one_report(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticjob._runtime.store_pod.coordinator.REPORT_SECONDS_PER_AGENT", 3600.0)
    operator = await peers.link(LinkRole.OPERATOR)
    node = await peers.node(0)
    await receive(operator, Report, lambda r: bool(r.nodes))
    node.send(Leaving("done"))
    assert (await receive(node, Finish)).outcome is Outcome.LEFT
    await receive(await peers.node(1), Standby)
    peers.coordinator.report_again()
    assert [n.index for n in (await receive(operator, Report)).nodes] == [1]


async def test_a_message_that_its_sender_may_not_send_is_ignored_and_counted(peers: Peers) -> None:
    stranger = await peers.link()
    stranger.send(Leaving("never announced"))
    assert await asyncio.wait_for(stranger.receive(), 10) is None
    node = await peers.node(0)
    node.send(OperatorView(99, 1, SETTINGS, 0, None, ()))
    operator = await peers.link(LinkRole.OPERATOR)
    operator.send(Ready())
    await receive(operator, Report, lambda r: bool(r.nodes))
    node.send(Leaving("done"))
    assert (await receive(node, Finish)).outcome is Outcome.LEFT
    assert peers.coordinator.dropped == 3
    assert not peers.coordinator.state.operator_seen


async def test_step_times_reach_the_operator_as_a_straggler(peers: Peers) -> None:
    operator, node, round_id = await peers.one_node_trains(workers=2)
    for _ in range(2):
        node.send(StepTimes(round_id, 0.1, (0.02, 0.08)))
    straggler = (await receive(operator, Report, lambda r: r.straggler is not None)).straggler
    assert straggler is not None
    assert (straggler.rank, straggler.pod, straggler.own_seconds, straggler.median_seconds) == (1, "j-0-0", 0.08, 0.02)
    node.send(Leaving("SIGTERM"))
    node.send(WorkersStopped(round_id, 6000))
    assert (await receive(operator, Report, lambda r: r.round is None)).straggler is None


async def test_the_slowest_transfer_of_a_state_reaches_the_operator(peers: Peers) -> None:
    operator, node, round_id = await peers.one_node_trains(workers=2)
    slow = StateReceived(round_id, 1, 10**9, 0.5, "eth0")
    for received in (replace(slow, round=round_id._replace(number=9)), slow, replace(slow, rank=0, seconds=0.4)):
        node.send(received)
    node.send(Leaving("SIGTERM"))
    node.send(WorkersStopped(round_id, 6000))
    transfer = (await receive(operator, Report, lambda r: r.round is None)).state_transfer
    assert transfer is not None
    assert (transfer.received, transfer.pod) == (slow, "j-0-0")


async def test_a_change_of_progress_alone_is_reported_rarely(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "PROGRESS_SECONDS", 0.2)
    operator, node, round_id = await peers.one_node_trains(workers=1)
    node.send(TrainingProgress(round_id._replace(number=9), 1, None, None))
    first, *_, last = (TrainingProgress(round_id, step, 10, 0.5, (Metric("loss", "1"),)) for step in range(5))
    node.send(first)
    assert (await receive(operator, Report)).progress == first, "the first one at once, none of another round"
    for step in range(1, 5):
        node.send(replace(first, step=step))
    assert (await receive(operator, Report)).progress == last
    node.send(replace(first, step=9))
    node.send(WorkersSucceeded(round_id))
    end = await receive(operator, Report)
    assert (end.outcome, end.progress) == (Outcome.SUCCEEDED, replace(first, step=9)), "at once with any other change"


async def test_a_node_that_reconnects_over_a_new_link_is_not_lost(peers: Peers) -> None:
    await peers.node(0)
    again = await peers.node(0)
    other = await peers.node(1)
    assert (await receive(other, StartRound)).world_size == 2
    assert (await receive(again, StartRound)).world_size == 2


async def succeeded_together(peers: Peers, count: int) -> list[ControlLink]:
    """Return the links of nodes whose workers have just succeeded, before the coordinator has read that."""
    pods = tuple(ExpectedPod(index, 0, f"j-{index}-0", PodState.RUNNING) for index in range(count))
    operator = await peers.link(LinkRole.OPERATOR)
    operator.send(OperatorView(1, 1, RoundSettings(count, count, count), 0, None, pods))
    nodes = [await peers.node(index) for index in range(count)]
    starts = [await receive(node, StartRound) for node in nodes]
    assert [s.rank for s in starts] == list(range(count))
    for kind in (WorkersStarted, WorkersSucceeded):
        for node, start in zip(nodes, starts, strict=True):
            node.send(kind(start.round))
    return nodes


async def test_more_nodes_than_are_served_at_once_get_all_messages(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "AT_ONCE", 2)
    for node in await succeeded_together(peers, 7):
        assert (await receive(node, Finish)).outcome is Outcome.SUCCEEDED


async def test_a_store_that_ends_sends_what_waits(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "AT_ONCE", 1)
    nodes = await succeeded_together(peers, 3)
    while peers.coordinator.state.outcome is None:  # noqa: ASYNC110  # the turn after it is too late
        await asyncio.sleep(0)
    peers.coordinator.stop()
    for node in nodes:
        assert (await receive(node, Finish)).outcome is Outcome.SUCCEEDED
