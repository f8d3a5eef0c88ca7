"""The server disconnects and counts clients that break the protocol or a limit; other clients are not delayed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.contract.names import StoreClients
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.connections import Peer
from elasticjob._runtime.store.last_requests import MAX_SIZE, LastRequests
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Limits, Op
from support.common.examples import examples
from support.common.store_client import StoreClient

HELLO = wire.request(Op.VALIDATE, number=wire.MAGIC)
Start = Callable[..., Awaitable[tuple[StoreServer, int]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers: list[StoreServer] = []

    async def start_server(**limits: float) -> tuple[StoreServer, int]:
        servers.append(StoreServer(limits=Limits(**limits)))  # type: ignore[arg-type]
        return servers[-1], await servers[-1].start("127.0.0.1")

    yield start_server
    for server in servers:
        await server.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server has closed the connection; return True."""
    try:
        return await asyncio.wait_for(reader.read(), 10) is not None
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "unknown-operation"),
        (b"\x00" + (5).to_bytes(8, "little") + b"hello", "old-dialect"),  # torch 2.1: SET was 0
        (b"\x03" + (6).to_bytes(8, "little") + b"/init/" + bytes(8), "old-dialect"),  # torch 2.1: ADD was 3
        (wire.request(Op.VALIDATE, number=2**31), "not-a-tcpstore"),
        (wire.request(Op.PING, number=7), "not-a-tcpstore"),
        (
            wire.request(Op.LINK, number=1),
            "not-a-tcpstore",
        ),  # the server has no link handler
        (HELLO + HELLO, "out-of-place"),
        (HELLO + wire.request(Op.SET, [b"k"], [b"v" * 101]), "value-too-long"),
        (HELLO + wire.request(Op.SET, [b"k"], [b"x"]) + wire.request(Op.ADD, [b"k"], number=1), "not-a-number"),
    ],
)
async def test_an_invalid_request_closes_the_connection_and_is_counted(start: Start, data: bytes, reason: str) -> None:
    server, port = await start(value=100)
    good = await StoreClient.connect("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    assert await closed(reader)
    writer.close()
    assert dict(server.counters.dropped) == {reason: 1}
    await good.set("other", b"value")
    assert await good.get("other") == b"value"
    good.close()


async def test_the_last_requests_of_a_lost_client_are_executed_and_others_wake_up() -> None:
    """Two connections under one name: the client is lost when both are closed. One that leaves before is not lost."""
    server = StoreServer(last_requests=LastRequests())
    port = await server.start("127.0.0.1")
    requests = wire.request(Op.SET, [b"/lost"], [b"1"]) + wire.request(Op.APPEND, [b"/names"], [b"a,"])
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for number, (_, writer) in enumerate(connections):
        name = b"leaves" if number == 2 else b"stays"
        writer.write(HELLO + wire.request(Op.WHEN_LOST, [name], [requests]) + wire.request(Op.PING, number=7))
    for reader, _ in connections:
        assert await asyncio.wait_for(reader.readexactly(4), 10)
    other = await StoreClient.connect("127.0.0.1", port)
    waits = asyncio.ensure_future(other.get("lost"))
    connections[2][1].write(wire.request(Op.WHEN_LOST, [b"leaves"], [b""]))
    for closed_now in (2, 0):
        connections[closed_now][1].close()
        await until(lambda left=server.open_connections: server.open_connections < left)  # type: ignore[misc]
    assert not server.storage.check([b"/lost"]), "one of its connections is open, and the other client has left"
    connections[1][1].close()
    assert await asyncio.wait_for(waits, 10) == b"1"
    assert bytes(server.storage.get(b"/names")) == b"a,"
    other.close()
    await server.close()


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(b"name", b"\x07"), (b"other", b"\x07")], id="a connection belongs to one client"),
        pytest.param([(b"name", b"\x07" * (MAX_SIZE + 1))], id="too large"),
    ],
)
async def test_last_requests_are_bounded(requests: list[tuple[bytes, bytes]]) -> None:
    server = StoreServer(last_requests=LastRequests())
    port = await server.start("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + b"".join(wire.request(Op.WHEN_LOST, [name], [encoded]) for name, encoded in requests))
    assert await closed(reader)
    writer.close()
    assert dict(server.counters.dropped) == {"bad-last-requests": 1}
    await server.close()


async def test_a_server_without_them_refuses_last_requests(start: Start) -> None:
    server, port = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + wire.request(Op.WHEN_LOST, [b"name"], [b"\x07"]))
    assert await closed(reader)
    writer.close()
    assert dict(server.counters.dropped) == {"unknown-operation": 1}


async def test_a_silent_connection_is_closed(start: Start) -> None:
    server, port = await start(opening_timeout=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO[:3])
    assert await closed(reader)
    writer.close()
    assert server.counters.dropped["silent"] == 1


async def test_a_client_that_stops_within_a_request_is_disconnected(start: Start) -> None:
    server, port = await start(stall_timeout=0.2)
    good = await StoreClient.connect("127.0.0.1", port)
    used = server.storage.used
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + wire.request(Op.SET, [b"/k"], [b"x" * 5000])[:-1])
    assert await closed(reader)
    writer.close()
    assert dict(server.counters.dropped) == {"half-sent": 1}
    assert server.storage.used == used
    assert await good.num_keys() == 0
    good.close()


async def test_a_request_that_arrives_in_pieces_is_served(start: Start) -> None:
    server, port = await start()
    good = await StoreClient.connect("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = wire.request(Op.SET, [b"/k"], [b"x" * 50]) + wire.request(Op.GETNUMKEYS)
    writer.write(HELLO + request[:20])
    while not server.storage.used:
        await good.num_keys()
    writer.write(request[20:])
    assert await asyncio.wait_for(reader.readexactly(8), 10) == wire.i64(1)
    assert all(client.timer is None for client in server.clients)
    writer.close()
    good.close()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (wire.request(Op.GET, [b"k" * 11]), "key-too-long"),
        (wire.request(Op.CHECK, [b"k"] * 4), "too-many-keys"),
        (wire.request(Op.MULTI_SET, [b"k"] * 3, [b"v" * 90] * 3), "request-too-long"),
    ],
)
async def test_sizes_of_keys_and_requests_are_bounded(start: Start, request_: bytes, reason: str) -> None:
    server, port = await start(key=10, count=3, request=200)
    good = await StoreClient.connect("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + request_[:-1])
    assert await closed(reader)
    writer.close()
    assert dict(server.counters.dropped) == {reason: 1}
    assert await good.num_keys() == 0
    good.close()


def client_that_does_not_read(port: int, data: bytes) -> socket.socket:
    """Connect a client that sends requests and does not read the answers."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(HELLO + data)
    return sock


@pytest.mark.parametrize(
    ("limits", "logged"),
    [
        ({"stall_timeout": 0.05}, "does not read"),
        ({"total_write_buffer": 1_000_000, "write_buffer": 100_000}, "bytes unread"),
    ],
)
async def test_a_slow_reader_is_disconnected(
    start: Start, limits: dict[str, float], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, port = await start(**limits)
    good = await StoreClient.connect("127.0.0.1", port)
    await good.set("big", b"x" * 8_000_000)
    await good.num_keys()  # SET has no answer; the answer to this request shows that it has arrived
    with client_that_does_not_read(port, wire.request(Op.GET, [b"/big"]) * 1000):
        while not server.counters.dropped["slow-reader"]:
            await good.add("n", 1)
    assert logged in caplog.text
    assert sum(server.counters.dropped.values()) == 1
    good.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_slow_reader_gets_every_answer_once_it_reads(start: Start, waits: bool) -> None:
    """A client with many requests for a large value costs one buffer of memory."""
    server, port = await start(write_buffer=100_000)
    good = await StoreClient.connect("127.0.0.1", port)
    await good.set("big", b"x" * 1_000_000)
    await good.num_keys()  # SET has no answer; the answer to this request shows that it has arrived
    waits_that_end = [wire.request(Op.WAIT, [b"%d" % n]) + wire.request(Op.SET, [b"%d" % n], [b""]) for n in range(30)]
    get, size = wire.request(Op.GET, [b"/big"]), 1_000_008 + waits
    with client_that_does_not_read(port, b"".join((wait if waits else b"") + get for wait in waits_that_end)) as sock:
        while not server.slow_readers:
            await good.add("n", 1)
        (client,) = server.slow_readers
        assert client.transport.get_write_buffer_size() < 2_000_000
        reader, writer = await asyncio.open_connection(sock=sock)
        assert len(await asyncio.wait_for(reader.readexactly(30 * size), 20)) == 30 * size
        writer.close()
    assert not server.counters.dropped
    good.close()


async def test_a_client_with_endless_requests_does_not_delay_other_clients(start: Start) -> None:
    server, port = await start()
    good = await StoreClient.connect("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + wire.request(Op.GETNUMKEYS) * 50_000)
    before = server.counters.requests
    await good.add("n", 1)
    assert server.counters.requests - before < 10_000
    assert await asyncio.wait_for(reader.readexactly(8 * 50_000), 20)
    writer.close()
    good.close()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (wire.request(Op.MULTI_GET, [b"/big"] * 1000), "answer-too-long"),
        (wire.request(Op.APPEND, [b"/big"], [b"x" * 60_000]), "value-too-long"),
        (wire.request(Op.WAIT, [b"%d" % i for i in range(4000)]), "out-of-memory"),
        (wire.request(Op.SET, [b"k"], [b"x" * 90_000])[:-1] * 1, None),
    ],
)
async def test_no_request_makes_the_store_grow_beyond_its_limits(
    start: Start, request_: bytes, reason: str | None
) -> None:
    server, port = await start(value=100_000, reply=1_000_000, memory=400_000)
    good = await StoreClient.connect("127.0.0.1", port)
    await good.set("big", b"x" * 50_000)
    await good.num_keys()
    used = server.storage.used
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + request_)
    if reason is None:
        while server.storage.used < used + 90_000:  # a partly received request counts too
            await good.num_keys()
        writer.close()
    else:
        assert await closed(reader)
        assert server.counters.dropped[reason] == 1
        writer.close()
    while server.storage.used != used:
        await good.num_keys()
    good.close()


async def test_memory_and_connections_are_bounded(start: Start) -> None:
    server, port = await start(memory=1300, connections=2)
    one = await StoreClient.connect("127.0.0.1", port)
    two = await StoreClient.connect("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await closed(reader)
    writer.close()
    await two.set("k", b"x" * 990)
    await two.set("l", b"x" * 990)
    with pytest.raises(ConnectionError):
        await two.num_keys()
    assert await one.num_keys() == 1
    assert await one.delete("k")
    assert server.storage.used == 0
    assert dict(server.counters.dropped) == {"too-many-connections": 1, "out-of-memory": 1}
    one.close()


async def test_the_connection_limit_can_be_raised(start: Start) -> None:
    server, port = await start(connections=1)
    one = await StoreClient.connect("127.0.0.1", port)
    server.allow_connections(2)
    two = await StoreClient.connect("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await closed(reader)
    assert (await one.num_keys(), await two.num_keys()) == (0, 0)
    for client in (one, two, writer):
        client.close()


async def test_a_wait_ends_when_all_its_keys_exist(start: Start) -> None:
    _, port = await start()
    one = await StoreClient.connect("127.0.0.1", port)
    two = await StoreClient.connect("127.0.0.1", port)
    waiting = asyncio.ensure_future(one.wait(["a", "b"], timeout=10))
    await two.set("a", b"")
    await two.num_keys()
    assert not waiting.done()
    await two.set("b", b"")
    await waiting
    one.close()
    two.close()


async def test_pipelined_requests_are_answered_in_order_up_to_an_invalid_one(start: Start) -> None:
    _, port = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    requests = [
        HELLO,
        wire.request(Op.SET, [b"a"], [b"1"]),
        wire.request(Op.GET, [b"a"]),
        wire.request(Op.WAIT, [b"b"]),  # the client's own next request ends this wait
        wire.request(Op.SET, [b"b"], [b"2"]),
        wire.request(Op.GET, [b"b"]),
        HELLO,
        wire.request(Op.GET, [b"a"]),
    ]
    writer.write(b"".join(requests))
    answers = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answers == wire.sized(b"1") + b"\0" + wire.sized(b"2")


async def test_a_client_that_disconnects_during_a_wait_leaves_nothing_behind(start: Start) -> None:
    server, port = await start()
    one = await StoreClient.connect("127.0.0.1", port)
    waiting = asyncio.ensure_future(one.wait(["never"]))
    two = await StoreClient.connect("127.0.0.1", port)
    while not server.storage.waiters:
        await two.num_keys()
    one.close()
    with pytest.raises(ConnectionError):
        await waiting
    while server.storage.waiters:
        await two.num_keys()
    assert (len(server.clients), server.storage.used) == (1, 0)
    two.close()


@examples(60)
@given(data=st.lists(st.one_of(st.binary(max_size=60), st.just(HELLO), st.just(wire.request(Op.WAIT, [b"k"])))))
def test_fuzzed_bytes_never_block_other_clients(data: list[bytes]) -> None:
    async def scenario() -> None:
        server = StoreServer()
        port = await server.start("127.0.0.1")
        good = await StoreClient.connect("127.0.0.1", port)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(data))
        for turn in range(3):
            assert await asyncio.wait_for(good.add("n", 1), 5) == turn + 1
        writer.close()
        good.close()
        await server.close()

    asyncio.run(scenario())


# ---- who may use the store


class Nodes:
    """A server for the agents of a job. An agent's link is authenticated when the test lets it be."""

    def __init__(self, clients: StoreClients, **limits: float) -> None:
        self.server = StoreServer(limits=Limits(**limits), links=self._serve, clients=clients)  # type: ignore[arg-type]
        self.peers: list[Peer] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def _serve(self, peer: Peer, protocol: int, rest: bytes) -> None:
        self.peers.append(peer)
        stream = asyncio.StreamReader()
        peer.transport.set_protocol(asyncio.StreamReaderProtocol(stream))
        with contextlib.suppress(ConnectionError):
            await stream.read()
        peer.transport.close()

    async def link(self, address: str) -> Peer:
        """Open a link from the address and return the server's side of it."""
        _, writer = await open_from(address, self.port)
        self._writers.append(writer)
        writer.write(wire.request(Op.LINK, number=1))
        name = "{}:{}".format(*writer.get_extra_info("sockname"))
        await until(lambda: any(peer.name == name for peer in self.peers))
        return next(peer for peer in self.peers if peer.name == name)

    async def __aenter__(self) -> Nodes:
        self.port = await self.server.start("127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
        await self.server.close()


async def open_from(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 60 s"
        await asyncio.sleep(0.001)


async def test_a_store_without_clients_closes_their_connections(caplog: pytest.LogCaptureFixture) -> None:
    async with Nodes(StoreClients.NONE) as nodes:
        (await nodes.link("127.0.0.1")).authenticated(is_agent=True)
        with pytest.raises(ConnectionError):
            await StoreClient.connect("127.0.0.1", nodes.port)
        assert nodes.server.counters.dropped == {"no-tcpstore": 1}
        assert "this store has control links only" in caplog.text
        assert nodes.server.storage.used == 0


async def test_clients_on_a_nodes_address_are_served_once_the_node_has_its_link() -> None:
    async with Nodes(StoreClients.NODES) as nodes:
        own = await StoreClient.connect("127.0.0.1", nodes.port)
        reader, writer = await open_from("127.0.0.2", nodes.port)
        _, other = await open_from("127.0.0.3", nodes.port)
        for sent in (writer, other):
            sent.write(HELLO + wire.request(Op.ADD, [b"/k"], number=1))
        link = await nodes.link("127.0.0.2")
        await until(lambda: len(nodes.server.connections.waiting) == 2)
        assert await own.num_keys() == 0
        link.authenticated(is_agent=True)
        assert await asyncio.wait_for(reader.readexactly(8), 10) == wire.i64(1)
        assert await own.get("k") == b"1"  # the other address has no link
        again, again_writer = await open_from("127.0.0.2", nodes.port)
        again_writer.write(HELLO + wire.request(Op.GETNUMKEYS))
        assert await asyncio.wait_for(again.readexactly(8), 10) == wire.i64(1)
        for sent in (writer, other, again_writer):
            sent.close()
        own.close()


async def test_an_address_is_admitted_no_more_when_its_last_link_has_ended() -> None:
    async with Nodes(StoreClients.NODES, link_timeout=0.05) as nodes:
        links = [await nodes.link("127.0.0.2") for _ in range(2)]
        for link in links:
            link.authenticated(is_agent=True)
        for left in (1, 0):
            links.pop().transport.abort()
            await until(lambda: nodes.server.open_connections == left)  # noqa: B023
            reader, writer = await open_from("127.0.0.2", nodes.port)
            writer.write(HELLO + wire.request(Op.GETNUMKEYS))
            served = await asyncio.wait_for(reader.read(8), 10)
            assert served == (wire.i64(0) if left else b"")
            writer.close()
            await until(lambda: nodes.server.open_connections == left)  # noqa: B023
        assert nodes.server.counters.dropped == {"no-link": 1}


async def served(nodes: Nodes, address: str) -> bool:
    """Return whether a client on this address is served within the time that it may wait for its agent."""
    reader, writer = await open_from(address, nodes.port)
    writer.write(HELLO + wire.request(Op.GETNUMKEYS))
    found = await asyncio.wait_for(reader.read(8), 10)
    writer.close()
    return found == wire.i64(0)


async def test_clients_on_the_addresses_of_expected_nodes_are_served_without_a_link() -> None:
    """They may be earlier than the server knows what to expect."""
    async with Nodes(StoreClients.NODES, link_timeout=0.5) as nodes:
        early, later, other = [asyncio.ensure_future(served(nodes, f"127.0.0.{n}")) for n in (2, 2, 4)]
        await until(lambda: sum(map(len, nodes.server.connections.waiting.values())) == 3)
        nodes.server.expect_agents(["127.0.0.1", "::ffff:127.0.0.2", "127.0.0.3", "a-host-name"])
        assert await early
        assert await later
        assert await served(nodes, "127.0.0.3")
        assert not await other
        assert not nodes.server.connections.waiting


async def test_an_address_without_a_link_is_expected_for_as_long_as_a_client_waits() -> None:
    async with Nodes(StoreClients.NODES, link_timeout=0.05) as nodes:
        nodes.server.expect_agents(["127.0.0.2"])
        assert await served(nodes, "127.0.0.2")
        end = asyncio.get_running_loop().time() + 0.05
        await until(lambda: asyncio.get_running_loop().time() >= end)
        assert not await served(nodes, "127.0.0.2")


async def test_an_expected_address_that_has_had_a_link_is_admitted_while_it_has_one() -> None:
    async with Nodes(StoreClients.NODES, link_timeout=0.5) as nodes:
        nodes.server.expect_agents(["127.0.0.2", "127.0.0.3"])
        link = await nodes.link("127.0.0.2")
        link.authenticated(is_agent=True)
        assert await served(nodes, "127.0.0.2")
        link.transport.abort()
        await until(lambda: nodes.server.open_connections == 0)
        nodes_3, nodes_2 = await served(nodes, "127.0.0.3"), await served(nodes, "127.0.0.2")
        assert (nodes_3, nodes_2) == (True, False)


async def test_an_operators_link_admits_no_client() -> None:
    async with Nodes(StoreClients.NODES, link_timeout=0.05) as nodes:
        (await nodes.link("127.0.0.2")).authenticated()
        reader, writer = await open_from("127.0.0.2", nodes.port)
        writer.write(HELLO + wire.request(Op.GETNUMKEYS))
        assert await closed(reader)
        writer.close()
        assert nodes.server.counters.dropped == {"no-link": 1}


async def test_a_client_that_waits_for_its_node_holds_few_bytes() -> None:
    async with Nodes(StoreClients.NODES, unauthenticated_bytes=1000) as nodes:
        reader, writer = await open_from("127.0.0.2", nodes.port)
        writer.write(HELLO + wire.request(Op.SET, [b"/k"], [b"x" * 5000]))
        assert await closed(reader)
        writer.close()
        assert nodes.server.counters.dropped == {"too-much-unauthenticated": 1}
        assert nodes.server.storage.used == 0


@pytest.mark.parametrize("sent", [b"", HELLO, wire.request(Op.LINK, number=1)])
async def test_connections_that_do_not_authenticate_do_not_delay_a_node(sent: bytes) -> None:
    """They are closed from the oldest on, whatever they wait for, and never one that is authenticated."""
    async with Nodes(StoreClients.NODES, unauthenticated=20, connections=60) as nodes:
        (await nodes.link("127.0.0.2")).authenticated(is_agent=True)
        member = await StoreClient.connect("127.0.0.1", nodes.port)
        idle = [await open_from("127.0.0.3", nodes.port) for _ in range(200)]
        for _, writer in idle:
            writer.write(sent)
        began = asyncio.get_running_loop().time()
        node = await nodes.link("127.0.0.4")
        node.authenticated(is_agent=True)
        assert asyncio.get_running_loop().time() - began < 1.0
        assert await member.add("n", 1) == 1
        await until(lambda: nodes.server.open_connections <= 23)
        assert len(nodes.server.connections.unauthenticated) <= 20
        assert not nodes.peers[0].transport.is_closing()
        assert nodes.server.counters.dropped["too-many-unauthenticated"] >= 180
        for _, writer in idle:
            writer.close()
        member.close()


async def test_authenticated_connections_displace_others_at_the_limit_of_all() -> None:
    async with Nodes(StoreClients.NODES, connections=5) as nodes:
        idle = [await open_from("127.0.0.3", nodes.port) for _ in range(5)]
        members = [await StoreClient.connect("127.0.0.1", nodes.port) for _ in range(5)]
        with pytest.raises(ConnectionError):
            await StoreClient.connect("127.0.0.1", nodes.port)
        assert [await member.num_keys() for member in members] == [0] * 5
        assert nodes.server.counters.dropped == {"too-many-connections": 6}
        for _, writer in idle:
            writer.close()
        for member in members:
            member.close()


async def test_appends_to_a_large_value_take_the_time_of_what_is_appended(start: Start) -> None:
    _, port = await start()
    client = await StoreClient.connect("127.0.0.1", port)
    await client.set("k", b"x" * 8_000_000)
    await client.append("k", b"y")
    await client.num_keys()
    began = asyncio.get_running_loop().time()
    for _ in range(2000):  # 1.5 s and more where each copies the value
        await client.append("k", b"z")
    assert await client.num_keys() == 1
    assert asyncio.get_running_loop().time() - began < 0.5
    assert (await client.get("k"))[-2002:] == b"xy" + b"z" * 2000
    client.close()
