"""Our rendezvous handler and the coordinator when something goes wrong, with the coordinator in this process."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import groupby
from typing import Any

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import api  # noqa: E402

from elasticjob._runtime.contract.messages import (  # noqa: E402
    Announce,
    Message,
    RoundPhase,
    RoundSettings,
    WorkersFailed,
    WorkersStarted,
)
from elasticjob._runtime.control_link.link import ControlLink, LinkGate, LinkRole, Welcome, connect  # noqa: E402
from elasticjob._runtime.rendezvous.observations.report import round_phase  # noqa: E402
from elasticjob._runtime.rendezvous.state import initial_state  # noqa: E402
from elasticjob._runtime.store.server import StoreServer  # noqa: E402
from elasticjob._runtime.store_pod.coordinator import Coordinator  # noqa: E402
from elasticjob._runtime.torchrun.create import create_handler  # noqa: E402
from elasticjob._runtime.torchrun.handler import ElasticJobRendezvousHandler  # noqa: E402
from elasticjob._runtime.torchrun.stores import node_key  # noqa: E402

RUN_ID = "errors"


def params(port: int, **conf: Any) -> Any:
    endpoint, conf = f"127.0.0.1:{port}", {"is_host": False, "read_timeout": 20, **conf}
    return api.RendezvousParameters("elasticjob", endpoint, RUN_ID, 2, 2, local_addr="127.0.0.1", **conf)


class Store:
    """A store with a coordinator, in an event loop of its own thread. Records what each node sends."""

    def __init__(self, serve: Callable[[ControlLink], Awaitable[None]] | None = None) -> None:
        self.sent: dict[str, list[Message]] = {}
        self._serve = serve
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self.call(self._start())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the store's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> int:
        self.key = node_key(params(1))
        now = time.monotonic()
        self.coordinator = Coordinator(initial_state(RoundSettings(2, 2, 2), attempt=1, store=0, now=now))
        gate = LinkGate(Welcome(RUN_ID, 1, 0), {LinkRole.AGENT: self.key}, self._serve or self._record)
        self.server = StoreServer(links=gate.accept)
        self.coordinator.start()
        return await self.server.start("127.0.0.1")

    async def _record(self, link: ControlLink) -> None:
        receive, node = link.receive, ""

        async def recorded() -> Message | None:
            nonlocal node
            message = await receive()
            if isinstance(message, Announce):
                node = message.pod
            if message is not None:
                self.sent.setdefault(node, []).append(message)
            return message

        link.receive = recorded  # type: ignore[method-assign]
        await self.coordinator.serve(link)

    async def _stop(self) -> None:
        self.coordinator.stop()
        await self.server.close()

    def close(self) -> None:
        """Close every connection; nodes cannot connect again."""
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    if not made._loop.is_closed():
        made.close()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not so after 30 s: {what}"
        time.sleep(0.01)


def join(*handlers: ElasticJobRendezvousHandler) -> None:
    """Bring all handlers into one round."""
    threads = [threading.Thread(target=handler.next_rendezvous) for handler in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "no round was formed"


def started(sent: list[Message]) -> int:
    """Return how often a node has reported that its workers started."""
    return sum(isinstance(message, WorkersStarted) for message in sent)


def two_in_a_round(store: Store) -> tuple[ElasticJobRendezvousHandler, ElasticJobRendezvousHandler]:
    one, two = create_handler(params(store.port)), create_handler(params(store.port))
    join(one, two)
    return one, two


def test_set_closed_raises_a_time_out_when_the_coordinator_does_not_answer() -> None:
    async def serve_silently(link: ControlLink) -> None:
        while await link.receive() is not None:
            pass

    silent = Store(serve_silently)
    handler = create_handler(params(silent.port, close_timeout=1))
    began = time.monotonic()
    with pytest.raises(api.RendezvousTimeoutError):
        handler.set_closed()
    assert time.monotonic() - began >= 1.0
    handler.end_session()
    silent.close()


def test_a_lost_link_is_logged_by_every_node_and_never_raised(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    one, two = two_in_a_round(store)
    caplog.clear()
    caplog.set_level(logging.INFO, "elasticjob")
    store.close()
    for handler in (one, two):
        until(lambda h=handler: h.session.down_since, "the node notices that its link is closed")  # type: ignore[misc]
        assert handler.num_nodes_waiting() == 0
    logged = [
        r
        for r in caplog.records
        if r.name == "elasticjob._runtime.control_link.coordinator_client" and "store" in r.message
    ]
    assert len(logged) >= 2
    for handler in (one, two):
        handler.end_session()


def test_a_node_sends_nothing_between_the_start_of_its_round_and_its_rejoin(store: Store) -> None:
    """Torch stops its heartbeats before a rejoin; here there is no heartbeat to stop."""
    handlers = two_in_a_round(store)
    interval = handlers[0].settings.keep_alive_interval.total_seconds()
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 1.5 * interval, "more than a keep-alive interval has passed")
    join(*handlers)
    until(lambda: [started(sent) for sent in store.sent.values()] == [2, 2], "the second round runs")
    for sent in store.sent.values():
        # The node that rejoins first reports that its workers failed. A node that has stopped when the coordinator
        # ends the round reports that once more.
        names = [type(message).__name__ for message in sent if not isinstance(message, WorkersFailed)]
        distinct = [name for name, _ in groupby(names)]
        assert distinct == ["Announce", "WorkersStarted", "WorkersStopped", "WorkersStarted"]
    for handler in handlers:
        handler.end_session()


def test_a_corrupt_message_costs_only_its_sender_its_link(store: Store) -> None:
    handlers = two_in_a_round(store)

    async def send_garbage() -> None:
        link = await connect("127.0.0.1", store.port, role=LinkRole.AGENT, key=store.key, run_id=RUN_ID)
        link.frames.send(b'{"type": "Announce", "index": "three"}')
        assert await link.receive() is None

    store.call(send_garbage())
    assert store.server.counters.dropped == {"bad-link": 1}
    assert round_phase(store.coordinator.state) is RoundPhase.RUNNING
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    assert len(store.coordinator.state.agents) == 2
    for handler in handlers:
        handler.end_session()


class Impostor:
    """Refuses the first links that reach its port, and relays the others to a store."""

    def __init__(self, store: Store, refusals: int) -> None:
        self._store = store
        self._refusals = refusals
        self.refused = 0
        self._relays: set[asyncio.Task[None]] = set()
        server = store.call(asyncio.start_server(self._serve, "127.0.0.1"))
        self.port: int = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refused < self._refusals:
            self.refused += 1
            frame = b'{"refused":"go away"}'
            writer.write(struct.pack("!I", len(frame)) + frame)
            writer.close()
            return
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._store.port)
        self._relays |= {
            asyncio.ensure_future(_copy(reader, store_writer)),
            asyncio.ensure_future(_copy(store_reader, writer)),
        }

    async def close(self) -> None:
        """End all links."""
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
    target.close()


def test_a_refusal_by_an_impostor_ends_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elasticjob")
    impostor = Impostor(store, refusals=3)
    one, two = create_handler(params(impostor.port)), create_handler(params(store.port))
    join(one, two)
    assert impostor.refused == 3
    assert "cannot connect to the store, retrying: LinkRefused: go away" in caplog.text
    impostor._refusals = 4
    session = one.session
    assert session is not None
    session.schedule(session.client.link.frames.transport.abort)
    until(lambda: impostor.refused == 4 and not session.down_since, "the node is connected again")
    assert [handler.num_nodes_waiting() for handler in (one, two)] == [0, 0]
    for handler in (one, two):
        handler.end_session()
    visitor = create_handler(params(impostor.port))
    impostor._refusals = 7
    assert not visitor.is_closed()
    assert impostor.refused == 7
    store.call(impostor.close())


def test_every_node_reports_to_a_successor_store_that_the_rendezvous_is_closed(store: Store) -> None:
    """Each of them: the node that closed it may have ended."""
    handlers = two_in_a_round(store)
    handlers[0].set_closed()
    until(handlers[1].is_closed, "the other node learns of it")
    for handler in handlers:
        assert handler.session is not None
        greeting = handler.session.greeting()
        assert [type(message).__name__ for message in greeting] == ["Announce", "Close"]
        handler.end_session()


def test_a_visitor_in_a_thread_with_an_event_loop_gets_its_answer(store: Store) -> None:
    """torch's handler may be called from a notebook, whose thread runs a loop."""

    async def ask() -> bool:
        closed: bool = create_handler(params(store.port)).is_closed()
        return closed

    assert asyncio.run(ask()) is False
    assert store.coordinator.state.agents == {}
