"""Control links: what they send, when they send it again, and what they keep. The tests play the stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import Message, OperatorView, Report, RoundSettings
from elasticjob._runtime.control_link.link import LinkError, LinkRefused, Welcome
from elasticjob_operator.lease import RENEW_DEADLINE
from elasticjob_operator.links import store_links as links_module
from elasticjob_operator.links.report_frames import ReportSource
from elasticjob_operator.links.store_links import LinkConnection, StoreLinks
from elasticjob_operator.links.view_generation import RAISE_AFTER
from elasticjob_operator.plan import StoreAddress
from support.operator.build import gathering, report, standby_report, worker

KEY = ("ns", "bert")
ADDRESS = StoreAddress("bert-rdzv-0", "10.0.0.1", 29400, "uid", 1, 0, (1.0, 3))
VIEW = OperatorView(0, 0, RoundSettings(1, 2, 2), charged=0, charged_round=None)


class FakeConnection:
    """The operator's end of a control link; the test is the other end."""

    def __init__(self, incarnation: int = 0) -> None:
        self.welcome = Welcome("uid", 1, incarnation)
        self.sent: list[Message] = []
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self.closed = False
        self.lost_by_keep_alive = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    async def receive(self) -> Message | None:
        return await self.inbox.get()

    def close(self) -> None:
        self.closed = True


class Stores:
    """Links whose attempts to connect get the prepared connections in order, and are refused without one."""

    def __init__(self) -> None:
        self.connections: list[FakeConnection] = []
        self.attempts: list[StoreAddress] = []
        self.now = 100.0
        self.enqueued: list[tuple[str, str]] = []
        self.keys: list[bytes] = []
        self.sources: list[ReportSource] = []
        self.generation = 7
        self.links = self.new_operator()

    def new_operator(self, raise_after: float = 0.0) -> StoreLinks:
        """Return the links of an operator that has sent nothing yet."""
        return StoreLinks(
            self.enqueued.append, lambda: self.generation, self.connect, lambda: self.now, raise_after=raise_after
        )

    async def connect(self, address: StoreAddress, key: bytes, source: ReportSource) -> LinkConnection:
        self.attempts.append(address)
        self.keys.append(key)
        self.sources.append(source)
        if not self.connections:
            raise LinkRefused("not yet")
        return self.connections.pop(0)

    async def until(self, met: object) -> None:
        """Let tasks run until `met()` holds."""
        assert callable(met)
        for _ in range(500):
            if met():
                return
            await asyncio.sleep(0)
        raise AssertionError("the condition was not met")


@pytest.fixture
async def stores(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stores]:
    monkeypatch.setattr(links_module, "FIRST_BACKOFF", 0.0)
    monkeypatch.setattr(links_module, "LONGEST_BACKOFF", 0.0)
    found = Stores()
    yield found
    await found.links.close()


async def connected(stores: Stores, first: Report) -> FakeConnection:
    connection = FakeConnection()
    stores.connections.append(connection)
    stores.links.set_address(KEY, ADDRESS, b"k")
    connection.inbox.put_nowait(first)
    await stores.until(lambda: stores.links.view(KEY).connected)
    return connection


async def test_a_link_retries_until_the_store_answers_and_is_connected_from_its_first_report(stores: Stores) -> None:
    stores.links.set_address(KEY, ADDRESS, b"k")
    await stores.until(lambda: len(stores.attempts) > 3)
    assert stores.links.view(KEY).connected is False
    connection = FakeConnection()
    stores.connections.append(connection)
    stores.now = 105.0
    connection.inbox.put_nowait(gathering())
    await stores.until(lambda: stores.links.view(KEY).connected)
    assert stores.links.view(KEY).since == 105.0
    assert stores.enqueued[-1] == KEY


async def test_a_view_is_sent_once_with_growing_sequence_and_again_on_a_new_link(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    stores.links.set_operator_view(KEY, VIEW)
    stores.links.set_operator_view(KEY, replace(VIEW))
    stores.links.set_operator_view(KEY, replace(VIEW, charged=1))
    assert [(v.lease, v.charged) for v in connection.sent if isinstance(v, OperatorView)] == [(7, 0), (7, 1)]
    assert {v.sent_at for v in connection.sent if isinstance(v, OperatorView)} == {stores.now}
    second = FakeConnection()
    stores.connections.append(second)
    second.inbox.put_nowait(gathering())
    connection.inbox.put_nowait(None)
    await stores.until(lambda: second.sent)
    numbers = [v.sequence for v in (*connection.sent, *second.sent) if isinstance(v, OperatorView)]
    assert numbers == sorted(set(numbers))
    assert [v.charged for v in second.sent if isinstance(v, OperatorView)] == [1]


async def test_a_report_that_only_answers_this_operators_view_enqueues_nothing(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    before = len(stores.enqueued)
    connection.inbox.put_nowait(replace(gathering(), view_lease=7))
    await stores.until(lambda: (report := stores.links.view(KEY).report) is not None and report.view_lease == 7)
    assert len(stores.enqueued) == before
    connection.inbox.put_nowait(replace(gathering(), view_lease=7, lost_pods=("bert-1-0",)))
    await stores.until(lambda: len(stores.enqueued) > before)


async def test_after_a_lost_link_the_last_report_is_kept_and_lost_pods_are_not(stores: Stores) -> None:
    latest = report(worker(0), lost_pods=("bert-1-0",))
    connection = await connected(stores, latest)
    stores.now = 110.0
    connection.inbox.put_nowait(replace(latest, lost_pods=("bert-1-0", "bert-2-0")))
    await stores.until(lambda: len(stores.links.view(KEY).lost_pods) == 2)
    assert stores.links.view(KEY).lost_pods == {"bert-1-0": 100.0, "bert-2-0": 110.0}
    connection.inbox.put_nowait(None)
    await stores.until(lambda: not stores.links.view(KEY).connected)
    view = stores.links.view(KEY)
    assert (view.since, dict(view.lost_pods), view.report is not None) == (110.0, {}, True)
    assert connection.closed


async def test_a_new_store_gets_a_new_link_and_the_old_one_is_closed(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    stores.links.set_operator_view(KEY, VIEW)
    successor = FakeConnection(incarnation=1)
    successor.inbox.put_nowait(gathering(incarnation=1))
    stores.connections.append(successor)
    stores.links.set_address(KEY, replace(ADDRESS, pod="bert-rdzv-1", incarnation=1), b"k")
    assert connection.closed
    assert stores.links.view(KEY).connected is False
    await stores.until(lambda: successor.sent)
    stores.links.set_address(KEY, None, b"")
    assert successor.closed


async def test_a_link_lost_by_keep_alive_is_disconnected_since_the_last_answered_keep_alive(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    stores.now, connection.lost_by_keep_alive = 110.0, True
    connection.inbox.put_nowait(None)
    await stores.until(lambda: not stores.links.view(KEY).connected)
    assert stores.links.view(KEY).since == 107.0


async def test_the_last_report_of_the_previous_store_is_kept_while_its_successor_serves(stores: Stores) -> None:
    last = report(worker(0))
    await connected(stores, last)
    successor = FakeConnection(incarnation=1)
    stores.connections.append(successor)
    stores.links.set_address(KEY, replace(ADDRESS, pod="bert-rdzv-1", incarnation=1), b"k")
    assert stores.links.view(KEY).previous_report is None
    for latest in (gathering(incarnation=1), gathering(worker(0), incarnation=1)):
        successor.inbox.put_nowait(latest)
        await stores.until(lambda latest=latest: stores.links.view(KEY).report == latest)
        assert stores.links.view(KEY).previous_report == last


async def test_a_job_may_send_more_over_its_open_link_once_it_has_more_pods(stores: Stores) -> None:
    await connected(stores, gathering())
    for pods, most in ((4, 4), (0, 4), (9, 9)):
        stores.links.set_address(KEY, replace(ADDRESS, pods=pods), b"k")
        assert [source.pods for source in stores.sources] == [most]


STANDBY = replace(ADDRESS, pod="bert-rdzv-1", host="10.0.0.2", incarnation=1)


async def test_the_standby_store_has_a_link_of_its_own_and_keeps_it_when_it_becomes_the_store(stores: Stores) -> None:
    last = report(worker(0))
    connection = await connected(stores, last)
    standby = FakeConnection(incarnation=1)
    stores.connections.append(standby)
    stores.links.set_address(KEY, ADDRESS, b"k", STANDBY)
    stores.links.set_operator_view(KEY, VIEW)
    stores.links.set_standby_view(KEY, replace(VIEW, charged=1))
    passive = standby_report()
    standby.inbox.put_nowait(passive)
    await stores.until(lambda: stores.links.standby_view(KEY).connected)
    assert [v.charged for v in standby.sent if isinstance(v, OperatorView)] == [1]
    assert stores.links.view(KEY).report == last
    stores.now = 120.0
    stores.links.set_address(KEY, STANDBY, b"k")
    view = stores.links.view(KEY)
    assert (view.connected, view.since, view.report, view.previous_report) == (True, 120.0, passive, last)
    assert connection.closed
    assert not standby.closed
    assert stores.links.standby_view(KEY).report is None
    stores.links.set_operator_view(KEY, replace(VIEW, charged=2))
    assert [v.charged for v in standby.sent if isinstance(v, OperatorView)] == [1, 2]


async def test_a_standby_store_that_is_gone_has_no_link(stores: Stores) -> None:
    await connected(stores, gathering())
    standby = FakeConnection(incarnation=1)
    stores.connections.append(standby)
    stores.links.set_address(KEY, ADDRESS, b"k", STANDBY)
    standby.inbox.put_nowait(standby_report())
    await stores.until(lambda: stores.links.standby_view(KEY).connected)
    stores.links.set_address(KEY, ADDRESS, b"k")
    assert standby.closed
    assert stores.links.standby_view(KEY).report is None
    assert stores.links.view(KEY).connected


async def test_a_store_of_another_incarnation_is_ignored(stores: Stores) -> None:
    connection = FakeConnection(incarnation=5)
    stores.connections.append(connection)
    stores.links.set_address(KEY, ADDRESS, b"k")
    connection.inbox.put_nowait(gathering())
    await stores.until(lambda: connection.closed)
    assert stores.links.view(KEY).connected is False
    assert connection.sent == []


async def test_a_refusal_is_kept_until_a_link_opens_and_the_next_attempt_uses_the_current_key(stores: Stores) -> None:
    stores.links.set_address(KEY, ADDRESS, b"old")
    await stores.until(lambda: stores.links.view(KEY).refused)
    assert (stores.links.view(KEY).refused, stores.enqueued) == ("not yet", [KEY])
    stores.links.set_address(KEY, ADDRESS, b"new")
    await stores.until(lambda: stores.keys[-1] == b"new")
    connection = FakeConnection()
    connection.inbox.put_nowait(gathering())
    stores.connections.append(connection)
    await stores.until(lambda: stores.links.view(KEY).connected)
    assert stores.links.view(KEY).refused == ""


def leases(connection: FakeConnection) -> list[int]:
    """Return the generations of the views that were sent over a connection."""
    return [view.lease for view in connection.sent if isinstance(view, OperatorView)]


@pytest.mark.parametrize(
    ("accepted", "generation", "sent"),
    [(-1, 1, [1]), (4, 5, [5]), (5, 1, [1, 6]), (1, 1, [1, 2]), (0, 0, [0, 1])],
    ids=["new store", "next holder", "the Lease was deleted", "deleted, same generation", "no leader election"],
)
async def test_a_new_operators_view_is_newer_than_what_the_store_has_accepted(
    stores: Stores, accepted: int, generation: int, sent: list[int]
) -> None:
    stores.generation = generation
    connection = await connected(stores, gathering(view_lease=accepted))
    stores.links.set_operator_view(KEY, VIEW)
    await asyncio.sleep(0)
    await stores.until(lambda: leases(connection)[-1] == sent[-1])
    assert leases(connection) in (sent, sent[1:], [sent[-1]] * 2)
    connection.inbox.put_nowait(gathering(worker(0), view_lease=sent[-1]))
    await stores.until(lambda: connection.inbox.empty())
    stores.links.set_operator_view(KEY, replace(VIEW, charged=1))
    assert leases(connection)[-1] == sent[-1]


async def test_an_operator_that_connects_again_keeps_its_generation(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    stores.links.set_operator_view(KEY, VIEW)
    second = FakeConnection()
    stores.connections.append(second)
    second.inbox.put_nowait(gathering(view_lease=7))
    connection.inbox.put_nowait(None)
    await stores.until(lambda: second.sent and second.inbox.empty())
    for _ in range(10):
        await asyncio.sleep(0)
    assert leases(second) == [7]


async def test_the_view_follows_the_first_report_so_that_this_report_does_not_count_for_another_operators(
    stores: Stores,
) -> None:
    connection = FakeConnection()
    stores.connections.append(connection)
    stores.links.set_address(KEY, ADDRESS, b"k")
    stores.links.set_operator_view(KEY, VIEW)
    await stores.until(lambda: not stores.connections)
    for _ in range(10):
        await asyncio.sleep(0)
    assert connection.sent == []
    connection.inbox.put_nowait(gathering())
    await stores.until(lambda: connection.sent)
    connection.inbox.put_nowait(gathering(worker(0), view_lease=7))
    await stores.until(lambda: connection.inbox.empty())
    for _ in range(10):
        await asyncio.sleep(0)
    assert leases(connection) == [7]


async def test_only_an_operator_that_still_leads_raises_the_generation(stores: Stores) -> None:
    """One that has lost the Lease stops its work within the deadline, and so before it raises the generation."""
    assert RAISE_AFTER > RENEW_DEADLINE
    stores.links = stores.new_operator(raise_after=RAISE_AFTER)
    connection = await connected(stores, gathering(view_lease=9))
    stores.links.set_operator_view(KEY, VIEW)
    for _ in range(10):
        await asyncio.sleep(0)
    assert leases(connection) == [7]
    await stores.links.close()
    assert leases(connection) == [7]


async def test_a_leader_whose_store_another_operator_took_over_raises_the_generation(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    stores.links.set_operator_view(KEY, VIEW)
    connection.inbox.put_nowait(gathering(worker(0), view_lease=8))
    await stores.until(lambda: leases(connection)[-1] == 9)


async def test_a_forgotten_job_has_no_link(stores: Stores) -> None:
    connection = await connected(stores, gathering())
    stores.links.forget(KEY)
    assert connection.closed
    assert stores.links.view(KEY).report is None
    stores.links.set_operator_view(KEY, VIEW)
    assert connection.sent == []


# ---- stores whose handshake is right and whose reports are not


class BadConnection(FakeConnection):
    """A link over which each message is wrong."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def receive(self) -> Message | None:
        raise self.error


@pytest.mark.parametrize("bad", [BadConnection(LinkError("no report")), FakeConnection()], ids=["invalid", "closed"])
async def test_a_store_that_authenticates_and_sends_no_report_is_not_connected_to_again_at_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, bad: FakeConnection
) -> None:
    monkeypatch.setattr(links_module, "FIRST_BACKOFF", 1000.0)
    bad.inbox.put_nowait(None)
    stores.connections += [bad, FakeConnection()]
    stores.links.set_address(KEY, ADDRESS, b"k")
    await stores.until(lambda: bad.closed)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(stores.attempts) == 1


async def test_a_link_that_has_served_is_opened_again_at_once(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "FIRST_BACKOFF", 1000.0)
    connection = await connected(stores, gathering())
    stores.now += links_module.SERVED_SECONDS
    stores.connections.append(FakeConnection())
    connection.inbox.put_nowait(None)
    await stores.until(lambda: len(stores.attempts) == 2)


async def test_an_unknown_error_does_not_end_the_link_for_ever(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    good = FakeConnection()
    good.inbox.put_nowait(gathering())
    stores.connections += [BadConnection(OverflowError("int too large to convert to float")), good]
    stores.links.set_address(KEY, ADDRESS, b"k")
    await stores.until(lambda: stores.links.view(KEY).connected)
    assert "following bert-rdzv-0 failed" in caplog.text


# ---- many stores at once


class SlowStores:
    """Stores that answer when `answer` is set, and the links of an operator that has just begun to follow 1000 jobs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.attempts: list[str] = []
        self.answer = asyncio.Event()
        self.all_tried = asyncio.Event()
        self.links = StoreLinks(lambda key: None, lambda: 0, self.connect, lambda: self.now)
        self.jobs = [("ns", f"job-{number}") for number in range(1000)]
        for key in self.jobs:
            self.links.set_address(key, replace(ADDRESS, pod=f"{key[1]}-rdzv-0"), b"k")

    async def connect(self, address: StoreAddress, key: bytes, source: ReportSource) -> LinkConnection:
        self.attempts.append(address.pod)
        if len(self.attempts) == len(self.jobs):
            self.all_tried.set()
        await self.answer.wait()
        return FakeConnection()


async def test_a_new_operator_connects_to_some_stores_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "TURN_SECONDS", 60.0)  # a busy machine may pause this process
    stores = SlowStores()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(stores.attempts) == links_module.CONNECTING
    stores.answer.set()
    for _ in range(500):
        await asyncio.sleep(0)
    assert len(stores.attempts) == len(stores.jobs)
    await stores.links.close()


async def test_stores_that_are_down_do_not_delay_the_others_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "TURN_SECONDS", 0.01)
    stores = SlowStores()
    await asyncio.wait_for(stores.all_tried.wait(), 20.0)
    await stores.links.close()


async def test_a_store_is_not_silent_before_the_first_attempt_to_connect_to_it() -> None:
    stores = SlowStores()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first, last = stores.jobs[0], stores.jobs[-1]
    stores.now += 30.0
    assert [stores.links.view(key).since for key in (first, last)] == [100.0, 130.0]
    stores.answer.set()
    for _ in range(500):
        await asyncio.sleep(0)
    stores.now += 30.0
    assert [stores.links.view(key).since for key in (first, last)] == [100.0, 130.0]
    await stores.links.close()
