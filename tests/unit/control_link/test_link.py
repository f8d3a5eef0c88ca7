"""Control links: authentication, misbehaving peers, and detection of a closed link."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from elasticjob._runtime.contract.messages import PROTOCOL, Leaving, Ready, Standby, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link import frames as frames_module
from elasticjob._runtime.control_link import link as link_module
from elasticjob._runtime.control_link.frames import MACS, TAG_SIZE, ForgedFrame
from elasticjob._runtime.control_link.link import (
    HANDSHAKE,
    ControlLink,
    LinkError,
    LinkGate,
    LinkRefused,
    LinkRole,
    Welcome,
    connect,
)
from elasticjob._runtime.control_link.time_limit import open_within
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Op
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive

NODE, OPERATOR = b"n" * 32, b"o" * 32
WELCOME = Welcome("run-1", 2, 3)
PROGRESS = TrainingProgress(RoundId(2, 3, 1), 5, None, None)


@dataclass
class Peer:
    """A server that accepts control links and answers each message with a Standby."""

    server: StoreServer
    port: int = 0
    links: asyncio.Queue[ControlLink] = field(default_factory=asyncio.Queue)
    ends: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def serve(self, link: ControlLink) -> None:
        self.links.put_nowait(link)
        try:
            while (message := await link.receive()) is not None:
                link.send(Standby(type(message).__name__))
            self.ends.put_nowait("closed")
        except LinkError as error:
            self.ends.put_nowait(str(error))


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    server = StoreServer()
    peer = Peer(server)
    server.serve_link = LinkGate(WELCOME, {LinkRole.AGENT: NODE, LinkRole.OPERATOR: OPERATOR}, peer.serve).accept
    peer.port = await server.start("127.0.0.1")
    yield peer
    await server.close()


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 60 s"
        await asyncio.sleep(0.001)


async def test_a_cancelled_attempt_ends_whenever_the_cancellation_comes() -> None:
    """Also as the kernel completes the TCP connection, and no store answers on it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for passes in range(60):
            opening = connect("127.0.0.1", silent.getsockname()[1], role=LinkRole.AGENT, key=NODE, run_id="run-1")
            attempt = asyncio.ensure_future(opening)
            for _ in range(passes):
                await asyncio.sleep(0)
            attempt.cancel()
            await until(attempt.done)
            assert attempt.cancelled()


async def test_a_connection_that_opens_as_its_attempt_is_cancelled_is_closed() -> None:
    opened = asyncio.Event()
    closed: list[str] = []

    async def opening() -> str:
        await opened.wait()
        return "connection"

    attempt = asyncio.ensure_future(open_within(10, opening(), closed.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opened.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    attempt.cancel()
    await until(attempt.done)
    assert attempt.cancelled()
    assert closed == ["connection"]


async def test_messages_go_both_ways(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    assert link.welcome == WELCOME
    link.send(Ready())
    link.send(Leaving("x"))
    assert [await link.receive(), await link.receive()] == [Standby("Ready"), Standby("Leaving")]
    assert (await peer.links.get()).role is LinkRole.AGENT
    link.close()
    assert await peer.ends.get() == "closed"


async def test_a_passive_store_says_so_in_its_welcome(peer: Peer) -> None:
    """The welcome is part of the proof and of the keys of the frames, also when it changes."""
    passive = True
    keys = {LinkRole.AGENT: NODE, LinkRole.OPERATOR: OPERATOR}
    peer.server.serve_link = LinkGate(WELCOME, keys, peer.serve, passive=lambda: passive).accept
    for passive in (True, False):
        link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
        assert link.welcome == replace(WELCOME, passive=passive)
        link.send(Ready())
        assert await link.receive() == Standby("Ready")
        link.close()


@pytest.mark.parametrize(
    ("role", "key", "run_id", "error"),
    [
        (LinkRole.AGENT, OPERATOR, "run-1", "wrong key for role node"),
        (LinkRole.OPERATOR, NODE, "run-1", "wrong key for role operator"),
        (LinkRole.AGENT, NODE, "run-2", "belongs to run 'run-2', this store to another one"),
    ],
)
async def test_a_client_with_a_wrong_key_or_run_is_refused(
    peer: Peer, role: LinkRole, key: bytes, run_id: str, error: str
) -> None:
    with pytest.raises(LinkRefused, match=error) as refused:
        await connect("127.0.0.1", peer.port, role=role, key=key, run_id=run_id)
    assert "run-1" not in str(refused.value)
    assert peer.server.counters.dropped["refused-link"] == 1
    assert peer.links.empty()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'{"proof":"00","welcome":{"run_id":"run-1","attempt":1,"incarnation":0}}', "did not prove"),
        (b'{"proof":"\\ud800","welcome":{"run_id":"run-1","attempt":1,"incarnation":0}}', "did not prove"),
        (b'{"proof":"00","welcome":{"run_id":"run-1","attempt":1,"incarnation":0,"new":NaN}}', "no valid welcome"),
        (b'{"proof":"00","welcome":{"run_id":"run-1","attempt":1}}', "incarnation: missing"),
        (b'{"proof":"00"}', "no valid welcome"),
    ],
)
async def test_a_store_without_the_key_is_refused(answer: bytes, error: str) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        for frame in (b'{"nonce":"00"}', answer):
            writer.write(struct.pack("!I", len(frame)) + frame)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(LinkError, match=error):
        await connect("127.0.0.1", port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    server.close()


async def test_another_version_of_the_handshake_is_refused(peer: Peer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write(wire.request(Op.LINK, number=HANDSHAKE + 1))
    assert b"uses version" in await asyncio.wait_for(reader.read(), 5)
    writer.close()


@pytest.mark.parametrize(
    ("peer", "agreed"),
    [({}, 2), ({"protocol": 2}, 2), ({"protocol": PROTOCOL}, PROTOCOL), ({"protocol": 99}, PROTOCOL)],
)
def test_both_sides_use_the_lower_version_of_the_messages(peer: dict[str, object], agreed: int) -> None:
    """A peer that names none is elasticjob 0.1.0."""
    assert link_module.lower_protocol(peer) == agreed


@pytest.mark.parametrize("protocol", [1, 0, -1, 2.0, True, "3", None, [3]])
def test_a_peer_of_an_unusable_version_is_refused(protocol: object) -> None:
    with pytest.raises(LinkRefused, match="this side needs version 2"):
        link_module.lower_protocol({"protocol": protocol})


async def test_an_older_peer_is_not_sent_what_it_does_not_know(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    assert (link.protocol, (await peer.links.get()).protocol) == (PROTOCOL, PROTOCOL)
    link.send(PROGRESS)
    link.protocol = 2
    link.send(PROGRESS)
    link.send(Ready())
    assert [await link.receive(), await link.receive()] == [Standby("TrainingProgress"), Standby("Ready")]


async def test_messages_of_an_unknown_type_are_ignored(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    link.frames.send(b'{"type":"OfALaterVersion","round":"1.0.1"}')
    link.send(Ready())
    assert await link.receive() == Standby("Ready")


async def test_unknown_fields_of_a_newer_welcome_are_ignored(peer: Peer) -> None:
    @dataclass(frozen=True)
    class NewerWelcome(Welcome):
        version: str = "9.9"

    newer = NewerWelcome(WELCOME.run_id, WELCOME.attempt, WELCOME.incarnation)
    peer.server.serve_link = LinkGate(newer, {LinkRole.AGENT: NODE}, peer.serve).accept
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    assert link.welcome == WELCOME
    link.send(Ready())
    assert await link.receive() == Standby("Ready")


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (struct.pack("!I", 2**20 + 1), "are allowed"),
        (b"abc", "not JSON"),
        (b"[]", "want an object"),
        (struct.pack("!I", 3) + b"abc", "its tag is wrong"),
    ],
)
async def test_an_invalid_frame_closes_the_link(peer: Peer, frame: bytes, error: str) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    if error in ("not JSON", "want an object"):
        link.frames.send(frame)
    else:
        link.frames.transport.write(frame)
    assert error in await asyncio.wait_for(peer.ends.get(), 5)
    assert await asyncio.wait_for(link.receive(), 5) is None


async def test_a_closed_link_is_noticed_by_a_peer_that_only_receives(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.OPERATOR, key=OPERATOR, run_id="run-1")
    listening = asyncio.ensure_future(link.receive())
    (await peer.links.get()).close()
    assert await asyncio.wait_for(listening, 5) is None


async def test_a_large_first_message_may_follow_the_handshake_at_once() -> None:
    large = Standby("x" * 100_000)

    async def send_at_once(link: ControlLink) -> None:
        link.send(large)
        await link.receive()

    server = StoreServer(links=LinkGate(WELCOME, {LinkRole.AGENT: NODE}, send_at_once).accept)
    port = await server.start("127.0.0.1")
    link = await connect("127.0.0.1", port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    assert await asyncio.wait_for(link.receive(), 5) == large
    await server.close()
    assert await asyncio.wait_for(link.receive(), 5) is None


async def test_a_peer_that_does_not_read_is_disconnected(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    link.frames.transport.pause_reading()
    served = await peer.links.get()
    while not served.frames.transport.is_closing():
        served.send(Standby("x" * 500_000))
    assert await asyncio.wait_for(peer.ends.get(), 5) == "the peer does not read its messages"
    link.close()


async def test_a_message_over_the_limit_is_not_sent(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    link.send(Leaving("x" * 2**20))
    with pytest.raises(LinkError, match="are allowed"):
        await link.receive()
    assert await asyncio.wait_for(peer.ends.get(), 5) == "closed"


@pytest.mark.parametrize(
    ("sent", "changed", "error"),
    [
        (b'"incarnation":3', b'"incarnation":4', "did not prove"),
        (b'"protocol":%d' % PROTOCOL, b'"protocol":2', "wrong key"),
    ],
)
async def test_a_changed_welcome_is_refused(sent: bytes, changed: bytes, error: str) -> None:
    """The server's proof covers its welcome, and both proofs cover the version of the messages."""
    gate = LinkGate(WELCOME, {LinkRole.AGENT: NODE}, lambda link: asyncio.sleep(0))
    server = StoreServer(links=gate.accept)
    port = await server.start("127.0.0.1")

    async def proxied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)

        async def relay_answers() -> None:
            while data := await server_reader.read(65536):
                writer.write(data.replace(sent, changed))
            writer.close()

        answers = asyncio.ensure_future(relay_answers())
        while data := await reader.read(65536):
            server_writer.write(data)
        server_writer.close()
        await answers

    proxy = await asyncio.start_server(proxied, "127.0.0.1")
    with pytest.raises(LinkRefused, match=error):
        await connect("127.0.0.1", proxy.sockets[0].getsockname()[1], role=LinkRole.AGENT, key=NODE, run_id="run-1")
    proxy.close()
    await server.close()


async def test_a_connection_that_is_not_accepted_times_out_before_the_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection to the address of a dead store is never accepted; a new one reaches its successor."""
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as pending:
        address = server.getsockname()
        for _ in range(2):
            sock = pending.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(address)
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await connect(*address, role=LinkRole.AGENT, key=NODE, run_id="run-1", timeout=3600)


async def test_links_use_kernel_keep_alive(peer: Peer) -> None:
    keep_alive = KeepAlive(interval=2, max_attempts=4)
    peer.server.serve_link = LinkGate(WELCOME, {LinkRole.AGENT: NODE}, peer.serve, keep_alive).accept
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1", keep_alive=keep_alive)
    for side in (link, await peer.links.get()):
        sock = side.frames.transport.get_extra_info("socket")
        tcp = [
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        ]
        assert tcp == [2, 2, 4, 8000]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    link.close()


async def test_a_proof_cannot_be_replayed(peer: Peer) -> None:
    """A second connection with the same bytes is refused, because the server's nonce is new."""
    sent = bytearray()
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)

    async def relay(source: asyncio.StreamReader, target: asyncio.StreamWriter, record: bool) -> None:
        while data := await source.read(65536):
            if record:
                sent.extend(data)
            target.write(data)
        target.close()

    async def proxied(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        await asyncio.gather(relay(client_reader, writer, True), relay(reader, client_writer, False))

    proxy = await asyncio.start_server(proxied, "127.0.0.1")
    port = proxy.sockets[0].getsockname()[1]
    link = await connect("127.0.0.1", port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    link.close()
    await peer.ends.get()
    proxy.close()
    replay_reader, replay_writer = await asyncio.open_connection("127.0.0.1", peer.port)
    replay_writer.write(sent)
    assert b"wrong key" in await asyncio.wait_for(replay_reader.read(), 5)
    replay_writer.close()


# ---- an impostor, and an attacker on the path


class PathProxy:
    """A proxy between both sides. It relays frames, except where `attack` replaces what is sent for one of them."""

    def __init__(self, port: int, attack: Attack, *, to_server: bool) -> None:
        self._port = port
        self._attack = attack
        self._to_server = to_server

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        server_writer.write(await reader.readexactly(5))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await asyncio.gather(
                self._relay(reader, server_writer, handshake=1, attacked=self._to_server),
                self._relay(server_reader, writer, handshake=2, attacked=not self._to_server),
            )
        writer.close()
        server_writer.close()

    async def _relay(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, handshake: int, attacked: bool
    ) -> None:
        for number in itertools.count(-handshake):
            try:
                (size,) = struct.unpack("!I", await source.readexactly(4))
                frame = await source.readexactly(size)
            except asyncio.IncompleteReadError:
                target.close()
                return
            for sent in self._attack(number, frame) if attacked else [frame]:
                target.write(struct.pack("!I", len(sent)) + sent)


Attack = Callable[[int, bytes], list[bytes]]
"""From the number of a frame after the handshake, and the frame, to the frames that are sent instead."""
FORGED = b'{"type":"Leaving","reason":"forged"}'


def repeated() -> Attack:
    return lambda number, frame: [frame, frame] if number == 1 else [frame]


def swapped() -> Attack:
    kept: list[bytes] = []

    def swap(number: int, frame: bytes) -> list[bytes]:
        if number == 1:
            kept.append(frame)
        return [] if number == 1 else [frame, *kept] if number == 2 else [frame]

    return swap


def merged() -> Attack:
    """Two frames become one, with the tag of the second."""
    kept: list[bytes] = []

    def merge(number: int, frame: bytes) -> list[bytes]:
        if number == 1:
            kept.append(frame[:-TAG_SIZE])
        return [] if number == 1 else [kept[0] + frame] if number == 2 else [frame]

    return merge


ATTACKS: dict[str, Callable[[], Attack]] = {
    "changed": lambda: lambda number, frame: [b"!" + frame[1:]] if number == 1 else [frame],
    "other tag": lambda: lambda number, frame: [frame[:-1] + bytes([frame[-1] ^ 1])] if number == 1 else [frame],
    "injected": lambda: lambda number, frame: [FORGED + b"x" * TAG_SIZE, frame] if number == 1 else [frame],
    "without a tag": lambda: lambda number, frame: [FORGED, frame] if number == 1 else [frame],
    "merged": merged,
    "too short": lambda: lambda number, frame: [b"", frame] if number == 1 else [frame],
    "omitted": lambda: lambda number, frame: [] if number == 1 else [frame],
    "repeated": repeated,
    "swapped": swapped,
}


@pytest.mark.parametrize("to_server", [True, False])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_frames_that_an_attacker_on_the_path_touches_end_the_link(
    peer: Peer, attack: str, to_server: bool
) -> None:
    path = PathProxy(peer.port, ATTACKS[attack](), to_server=to_server)
    proxy = await asyncio.start_server(path.serve, "127.0.0.1")
    link = await connect("127.0.0.1", proxy.sockets[0].getsockname()[1], role=LinkRole.AGENT, key=NODE, run_id="run-1")
    genuine = [Standby("Leaving")] * 4
    for _ in genuine:
        link.send(Leaving("x"))
    received: list[object] = []
    with contextlib.suppress(LinkError):
        while (message := await asyncio.wait_for(link.receive(), 5)) is not None:
            received.append(message)
    assert received == genuine[: len(received)]
    assert len(received) < len(genuine)
    if to_server:
        assert "its tag is wrong" in await asyncio.wait_for(peer.ends.get(), 5)
        await until(lambda: peer.server.counters.dropped)
        assert peer.server.counters.dropped == {"forged-frame": 1}
    else:
        with pytest.raises(ForgedFrame):
            await link.receive()
    proxy.close()


async def test_a_frame_of_one_direction_is_forged_in_the_other(peer: Peer) -> None:
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    link.frames.send_mac = link.frames.receive_mac
    link.send(Ready())
    assert "its tag is wrong" in await asyncio.wait_for(peer.ends.get(), 5)
    link.close()


async def test_links_have_different_frame_keys(peer: Peer) -> None:
    links = [await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1") for _ in range(2)]
    macs = [mac for link in links for mac in (link.frames.send_mac, link.frames.receive_mac)]
    assert len({mac.digest() for mac in macs if mac is not None}) == 4
    for link in links:
        link.close()


async def test_without_blake2b_hmac_protects_the_frames(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no BLAKE2b on a host that is restricted to the algorithms of FIPS."""

    def refuse(**_: object) -> None:
        raise ValueError("disabled for FIPS")

    assert MACS == ("blake2b", "hmac-sha256")
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.blake2b", refuse)
        assert not frames_module.is_available(frames_module.blake2b_mac)
    monkeypatch.setattr(link_module, "MACS", MACS[1:])
    link = await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")
    link.send(Ready())
    link.send(Leaving("x"))
    assert [await link.receive(), await link.receive()] == [Standby("Ready"), Standby("Leaving")]
    link.frames.transport.write(struct.pack("!I", len(FORGED) + TAG_SIZE) + FORGED + b"x" * TAG_SIZE)
    assert "its tag is wrong" in await asyncio.wait_for(peer.ends.get(), 5)
    link.close()


async def test_a_client_without_a_common_mac_is_refused(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    served = link_module.choose_mac
    monkeypatch.setattr(link_module, "choose_mac", lambda offered: served(["other"]))
    with pytest.raises(LinkRefused, match="none of the MACs blake2b, hmac-sha256"):
        await connect("127.0.0.1", peer.port, role=LinkRole.AGENT, key=NODE, run_id="run-1")


@pytest.mark.parametrize("sent", [b"x" * 20_000, struct.pack("!I", 0) * 5000])
async def test_a_client_sends_little_before_it_is_authenticated(peer: Peer, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write(wire.request(Op.LINK, number=HANDSHAKE) + sent)
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await until(lambda: peer.server.counters.dropped)
    assert sum(peer.server.counters.dropped.values()) == 1
    assert peer.links.empty()
