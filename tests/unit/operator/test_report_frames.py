"""What a store may send to the operator, and how fast. The stores here have their job's keys."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from elasticjob._runtime.contract.codec import MessageError
from elasticjob._runtime.contract.messages import (
    AgentReport,
    EndReason,
    Failure,
    FailureClass,
    Message,
    Report,
    RoundEnded,
    decode,
    encode,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link.link import ControlLink, LinkError, LinkGate, LinkRole, ReceiveBudget, Welcome
from elasticjob._runtime.store.server import StoreServer
from elasticjob_operator.kube.limits import ConcurrencyLimit
from elasticjob_operator.links import report_frames, store_links
from elasticjob_operator.links.report_frames import (
    BURST_SECONDS,
    LARGE_FRAME,
    REPORT_SECONDS,
    FrameDecoder,
    ReportSource,
    refuse_too_many_values,
)
from elasticjob_operator.links.store_links import LinkConnection, connect_store
from elasticjob_operator.plan import StoreAddress
from support.operator.build import elastic, gathering, job, run, status, steady, worker

KEY = b"o" * 32


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 20 s"
        await asyncio.sleep(0.001)


def of_nodes(count: int) -> Report:
    """Return the report of a store with so many nodes."""
    nodes = tuple(AgentReport(i, 0, f"bert-{i}-0", ready=True, member=False) for i in range(count))
    return replace(gathering(), nodes=nodes)


class Store:
    """A store that sends the same reports to each operator."""

    def __init__(self) -> None:
        self.reports = [gathering()]
        self.sent = asyncio.Event()
        self.server = StoreServer()
        self.server.serve_link = LinkGate(Welcome("uid", 1, 0), {LinkRole.OPERATOR: KEY}, self.serve).accept
        self.port = 0

    async def serve(self, link: ControlLink) -> None:
        for report in self.reports:
            link.send(report)
        self.sent.set()
        await link.receive()

    async def connect(self, pods: int) -> LinkConnection:
        """Return the link of an operator that knows a job of so many pods."""
        address = StoreAddress("p", "127.0.0.1", self.port, "uid", 1, 0, (1.0, 3))
        return await connect_store(address, KEY, ReportSource("a", pods))

    async def first_report(self, pods: int) -> Message | None:
        """Return what an operator receives first that knows a job of so many pods."""
        link = await self.connect(pods)
        try:
            return await link.receive()
        finally:
            link.close()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store()
    store.port = await store.server.start("127.0.0.1")
    yield store
    await store.server.close()


async def test_a_report_with_more_values_than_the_job_needs_ends_the_link(store: Store) -> None:
    store.reports = [replace(gathering(), lost_pods=("x",) * 200_000)]
    with pytest.raises(LinkError, match="values; 100128 are allowed for a job of 2 pods"):
        await store.first_report(pods=2)


async def test_a_large_job_is_reported_and_decoded_beside_the_event_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recorded(frame: bytes) -> Message:
        threads.append(threading.current_thread())
        return decode(frame)

    monkeypatch.setattr(report_frames, "decode", recorded)
    for count in (4096, 2):
        store.reports = [of_nodes(count)]
        assert await store.first_report(pods=count) == of_nodes(count)
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


def test_all_that_an_honest_store_may_keep_for_the_operator_fits() -> None:
    """256 ended rounds, in each of which all nodes were lost: it has nothing else of such a size."""
    raw = of_nodes(64)
    failure = "a, b, c, [d] {e}, " * 50
    ended = [{"pods": [node.pod for node in raw.nodes], "message": failure, "why": failure}] * 256
    frame = encode(replace(raw, reason=str(ended)))
    refuse_too_many_values(frame, 64)
    refuse_too_many_values(frame, 1)  # commas and brackets in texts are no values
    with pytest.raises(MessageError):
        refuse_too_many_values(b"[" + b"1," * 110_000 + frame, 1)


def test_all_nodes_of_the_largest_job_may_be_lost_in_40_rounds_that_no_operator_has_counted() -> None:
    raw = of_nodes(4096)
    pods = tuple(node.pod for node in raw.nodes)
    failure = Failure(FailureClass.DEVICE_UNHEALTHY, "bert-0-0", 1.0)
    ended = RoundEnded(RoundId(1, 0, 1), EndReason.AGENT_LOST, "", charged=True, time=1.0, world_size=1, lost_pods=pods)
    raw = replace(raw, lost_pods=pods, unhealthy=(failure,) * 4096, pods_that_may_write=pods)
    refuse_too_many_values(encode(replace(raw, ended_rounds=(ended,) * 40)), 4096)


def test_values_in_fields_that_a_report_does_not_have_are_bounded_for_the_largest_job_too() -> None:
    frame = encode(gathering())[:-1] + b',"zzz":[' + b"{}," * 200_000 + b"1]}"
    assert decode(frame) == gathering()
    with pytest.raises(MessageError, match="362144 are allowed"):
        refuse_too_many_values(frame, 4096)


def test_a_job_without_pods_may_send_no_more_because_it_may_have_many() -> None:
    fields = job(status=status(), **elastic(2, 4096))
    for workers in ((), (worker(0), worker(1))):
        address = run(replace(steady(), job=fields, workers=workers)).store_address
        assert address is not None
        assert address.pods == len(workers)


async def test_large_frames_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, most = 0, 0
    lock, source = threading.Lock(), ReportSource("a", 4096)

    def recorded(frame: bytes) -> Message:
        nonlocal decoding, most
        with lock:
            decoding += 1
            most = max(most, decoding)
        message = decode(frame)
        with lock:
            decoding -= 1
        return message

    monkeypatch.setattr(report_frames, "decode", recorded)
    frame = encode(replace(of_nodes(4096), reason="x" * 2**20))
    await asyncio.gather(*(FrameDecoder(source).decode(frame) for _ in range(4)))
    assert most == 1


async def test_the_last_of_many_reports_is_not_late(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them wait when the pause after the first one ends: only the last one is decoded."""
    decoded: list[Message] = []

    def recorded(frame: bytes) -> Message:
        decoded.append(decode(frame))
        return decoded[-1]

    monkeypatch.setattr(report_frames, "decode", recorded)
    monkeypatch.setattr(FrameDecoder, "pause", lambda self: store.sent.wait())
    store.reports = [of_nodes(count) for count in range(50)]
    link = await store.connect(pods=50)
    while await link.receive() != store.reports[-1]:
        pass
    link.close()
    assert len(decoded) < len(store.reports) / 2


async def test_frames_that_come_without_pause_are_decoded_at_a_bounded_rate() -> None:
    now = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    decoder, frame, count = FrameDecoder(ReportSource("a", 2), lambda: now, sleep), encode(of_nodes(2)), 200
    for _ in range(count):
        await decoder.pause()
        await decoder.decode(frame)
    assert now - 100.0 == pytest.approx(count * REPORT_SECONDS - BURST_SECONDS, abs=2 * REPORT_SECONDS)


async def test_a_frame_that_takes_long_is_followed_by_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 100.0, []

    def slow(frame: bytes) -> Message:
        nonlocal now
        now += 1.0
        return decode(frame)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(report_frames, "decode", slow)
    decoder, frame = FrameDecoder(ReportSource("a", 2), lambda: now, sleep), encode(of_nodes(2))
    for _ in range(2):
        await decoder.pause()
        await decoder.decode(frame)
    assert pauses == [report_frames.PAUSE_FACTOR - BURST_SECONDS]


async def test_what_waits_of_all_stores_is_bounded_and_the_greediest_one_loses_its_link(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_links, "RECEIVED", ReceiveBudget(500_000))
    honest = await store.connect(2)
    await asyncio.wait_for(store.sent.wait(), 20.0)
    store.reports = [of_nodes(15_000)]
    assert len(encode(store.reports[0])) > 500_000
    for _ in range(2):
        greedy = await store.connect(15_000)
        with pytest.raises(LinkError, match="all connections together may hold 500000"):
            await asyncio.wait_for(greedy.receive(), 20.0)
    assert await asyncio.wait_for(honest.receive(), 20.0) == gathering()
    honest.close()


async def test_a_link_that_is_closed_leaves_no_report_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ReceiveBudget(store_links.RECEIVED_BYTES)
    monkeypatch.setattr(store_links, "RECEIVED", budget)
    link = await store.connect(2)
    await until(lambda: budget.total > 0)
    link.close()
    assert budget.total == 0


class HeldThread:
    """Stands for the thread that decodes: it goes on once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.decoded: list[int] = []
        """Numbers of nodes in the reports, in the order in which they were decoded."""

    def decode(self, frame: bytes, pods: int) -> tuple[Message, float]:
        assert self.go.wait(20.0)
        message = decode(frame)
        assert isinstance(message, Report)
        self.decoded.append(len(message.nodes))
        return message, 0.0


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> HeldThread:
    thread = HeldThread()
    monkeypatch.setattr(report_frames, "decode_in_thread", thread.decode)
    return thread


async def receive(namespace: str, nodes: int) -> Message:
    """Receive and decode a report of so many nodes as a link to a store of that namespace does."""
    frame, decoder = encode(of_nodes(nodes)), FrameDecoder(ReportSource(namespace, 4096))
    await decoder.pause()
    async with decoder.turn(len(frame)):
        return await decoder.decode(frame)


async def test_large_frames_of_one_tenant_delay_those_of_another_one_by_one_and_small_ones_not_at_all(
    thread: HeldThread,
) -> None:
    assert len(encode(of_nodes(2000))) > LARGE_FRAME
    links = [asyncio.create_task(receive("greedy", 2000 + number)) for number in range(20)]
    await asyncio.sleep(0)
    links.append(asyncio.create_task(receive("honest", 3000)))
    assert await asyncio.wait_for(receive("honest", 2), 20.0) == of_nodes(2)
    assert thread.decoded == []
    thread.go.set()
    await asyncio.gather(*links)
    assert sorted(thread.decoded[:3]) == [2000, 2001, 3000]
    assert len(thread.decoded) == 21


@pytest.mark.parametrize("late", [False, True], ids=["waits", "its turn has come"])
async def test_a_link_that_ends_while_its_large_frame_waits_holds_up_no_other(late: bool) -> None:
    turns = ConcurrencyLimit(1)
    entered = asyncio.Event()

    async def take() -> None:
        async with turns.hold("b"):
            entered.set()

    async with turns.hold("a"):
        ended, waits = (asyncio.create_task(take()) for _ in range(2))
        await asyncio.sleep(0)
        if not late:
            ended.cancel()
    if late:
        ended.cancel()
    await asyncio.wait_for(waits, 20.0)
    assert ended.cancelled()
    entered.clear()
    await asyncio.wait_for(take(), 20.0)
    assert entered.is_set()


async def test_large_frames_wait_with_their_links_where_they_count(
    store: Store, thread: HeldThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ReceiveBudget(store_links.RECEIVED_BYTES)
    monkeypatch.setattr(store_links, "RECEIVED", budget)
    first = asyncio.create_task(receive("a", 2000))
    store.reports = [of_nodes(2001)]
    link = await store.connect(4096)
    received = asyncio.create_task(link.receive())
    await until(lambda: budget.total > LARGE_FRAME)
    for _ in range(10):
        await asyncio.sleep(0)
    assert budget.total > LARGE_FRAME
    thread.go.set()
    assert await first == of_nodes(2000)
    assert await received == of_nodes(2001)
    assert budget.total == 0
    link.close()
