"""The control link: one authenticated connection on the store's port, JSON messages both ways.

    client                                server
    LINK, u32 protocol ──────────────────►
    ◄──────────────────────────────────── {"nonce"}                      or {"refused"}
    {"role", "run_id", "nonce", "proof"} ►
    ◄──────────────────────────────────── {"proof", "welcome"}           or {"refused"}
    messages ◄───────────────────────────► messages

A proof is HMAC-SHA256 with the role's key over protocol, direction, role, run id and both nonces: neither side talks
to one that does not have the key, and no proof can be used again or sent back. A frame is u32 length (network order)
and JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from elasticjob.contract import codec
from elasticjob.contract.messages import PROTOCOL, Message, decode, encode
from elasticjob.store import wire

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a peer has to prove itself."""
_LENGTH = struct.Struct("!I")
_SEND_LIMIT = 32 * 1024 * 1024
"""Bytes that a peer may leave unread before it is dropped."""
_UNREAD_LIMIT = 10_000
"""Messages that we may leave unread before the peer has to wait."""


class LinkRole(str, Enum):
    """Who is at the other end, and with which key it proves that."""

    NODE = "node"
    OPERATOR = "operator"


_FRAME_LIMIT = {LinkRole.NODE: 1024 * 1024, LinkRole.OPERATOR: 8 * 1024 * 1024}
"""Bytes in one frame. Reports to the operator are as large as its facts."""
_HANDSHAKE_LIMIT = 4096


class LinkError(Exception):
    """The peer does not keep to the protocol; the link is closed."""


class LinkRefused(LinkError):  # noqa: N818
    """The store does not want this peer: wrong key, run or version. Trying again does not help."""


@dataclass(frozen=True)
class Welcome:
    """Who the store is."""

    run_id: str
    attempt: int
    incarnation: int


@dataclass(frozen=True)
class KeepAlive:
    """Kernel TCP keep-alive: a peer that vanished without a word is noticed after interval x attempts seconds."""

    interval: float = 1.0
    max_attempts: int = 3

    def apply(self, sock: socket.socket) -> None:
        interval = max(1, round(self.interval))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self.max_attempts)
        # Keep-alive does not run while data is on its way; this bounds that case.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, interval * self.max_attempts * 1000)


@dataclass
class LinkGate:
    """What a server needs to accept links; `serve` gets each one that has proven itself."""

    welcome: Welcome
    keys: Mapping[LinkRole, bytes]
    serve: Callable[[Link], Awaitable[None]]
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


class _Frames(asyncio.Protocol):
    """Frames over a transport, for either side."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.limit = _HANDSHAKE_LIMIT
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        self._error: LinkError | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._cut()
        if len(self._frames) > _UNREAD_LIMIT and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _cut(self) -> None:
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > self.limit:
                self._error = LinkError(f"a frame of {size} bytes; {self.limit} are allowed")
                self.transport.abort()
                break
            if len(self._buffer) - at < _LENGTH.size + size:
                break
            at += _LENGTH.size
            self._frames.append(bytes(self._buffer[at : at + size]))
            at += size
        del self._buffer[:at]
        if at or self._error:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def receive(self) -> bytes | None:
        """The next frame; None once the peer is gone and all its frames are read."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._paused and len(self._frames) < _UNREAD_LIMIT // 2:
            self._paused = False
            self.transport.resume_reading()
        return self._frames.popleft()

    def send(self, frame: bytes) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(_LENGTH.pack(len(frame)) + frame)
        if self.transport.get_write_buffer_size() > _SEND_LIMIT:
            self._error = LinkError("does not read what it is sent")
            self.transport.abort()

    async def receive_object(self) -> dict[str, Any]:
        """The next frame of a handshake; LinkError when there is none, LinkRefused when the peer refuses."""
        frame = await self.receive()
        if frame is None:
            raise LinkError("closed the connection during the handshake")
        data = _loads(frame)
        if "refused" in data:
            raise LinkRefused(str(data["refused"])[:200])
        return data


def _loads(frame: bytes) -> dict[str, Any]:
    try:
        data = codec.loads(frame)
    except codec.MessageError as error:
        raise LinkError(str(error)) from None
    if not isinstance(data, dict):
        raise LinkError("want an object")
    return data


class Link:
    """One authenticated connection, either side."""

    def __init__(self, frames: _Frames, role: LinkRole, welcome: Welcome, peer: str) -> None:
        self.role = role
        self.welcome = welcome
        self.peer = peer
        self._frames = frames
        frames.limit = _FRAME_LIMIT[role]

    def send(self, message: Message) -> None:
        """Buffer a message for the peer; dropped when the link is closed. Never blocks."""
        self._frames.send(encode(message))

    async def receive(self) -> Message | None:
        """The next message; None when the peer is gone; LinkError (and the link closed) on a bad frame."""
        frame = await self._frames.receive()
        if frame is None:
            return None
        try:
            return decode(frame)
        except codec.MessageError as error:
            self.close()
            raise LinkError(str(error)) from None

    def close(self) -> None:
        """Close after what is buffered has been sent."""
        self._frames.transport.close()


def _proof(key: bytes, direction: str, role: LinkRole, run_id: str, nonces: tuple[str, str]) -> str:
    covered = codec.dumps((PROTOCOL, direction, role.value, run_id, *nonces))
    return hmac.new(key, covered, hashlib.sha256).hexdigest()


# ---- the client's side


async def connect(
    host: str,
    port: int,
    *,
    role: LinkRole,
    key: bytes,
    run_id: str,
    keep_alive: KeepAlive = KeepAlive(),
    timeout: float = 5.0,
) -> Link:
    """A link to a store. LinkRefused: do not try again; LinkError, OSError, TimeoutError: do."""
    try:
        return await asyncio.wait_for(_connect(host, port, role, key, run_id, keep_alive), timeout)
    except asyncio.TimeoutError:  # another class before Python 3.11
        raise TimeoutError(f"no link to {host}:{port} within {timeout:g} s") from None


async def _connect(host: str, port: int, role: LinkRole, key: bytes, run_id: str, keep_alive: KeepAlive) -> Link:
    transport, frames = await asyncio.get_running_loop().create_connection(_Frames, host, port)
    try:
        keep_alive.apply(transport.get_extra_info("socket"))
        transport.write(wire.request(wire.Op.LINK, number=PROTOCOL))
        theirs = str((await frames.receive_object()).get("nonce"))
        ours = secrets.token_hex(16)
        proof = _proof(key, "client", role, run_id, (theirs, ours))
        frames.send(codec.dumps({"role": role.value, "run_id": run_id, "nonce": ours, "proof": proof}))
        answer = await frames.receive_object()
        expected = _proof(key, "server", role, run_id, (theirs, ours))
        if not hmac.compare_digest(expected.encode(), str(answer.get("proof")).encode()):
            raise LinkRefused("the store did not prove that it has the key")
        welcome = _parse_welcome(answer)
    except BaseException:
        transport.abort()
        raise
    return Link(frames, role, welcome, f"{host}:{port}")


def _parse_welcome(answer: dict[str, Any]) -> Welcome:
    try:
        return codec.parse(Welcome, answer.get("welcome"))
    except codec.MessageError as error:
        raise LinkError(str(error)) from None


# ---- the server's side


async def accept(
    gate: LinkGate, transport: asyncio.Transport, protocol: int, rest: bytes, drop: Callable[[str, str, str], None]
) -> None:
    """Take over a connection that asked to become a link: prove each other, then serve it until it closes."""
    frames = _Frames()
    frames.connection_made(transport)
    transport.set_protocol(frames)
    if rest:
        frames.data_received(rest)
    address = transport.get_extra_info("peername") or ("?", 0)
    peer = f"{address[0]}:{address[1]}"
    try:
        gate.keep_alive.apply(transport.get_extra_info("socket"))
        link = await asyncio.wait_for(_prove(gate, frames, protocol, peer), HANDSHAKE_TIMEOUT)
        await gate.serve(link)
    except asyncio.TimeoutError:
        drop("handshake-timeout", peer, "did not prove itself in time")
    except (LinkError, OSError) as error:
        frames.send(codec.dumps({"refused": str(error)}))
        drop("refused-link", peer, str(error))
    finally:
        transport.close()


async def _prove(gate: LinkGate, frames: _Frames, protocol: int, peer: str) -> Link:
    if protocol != PROTOCOL:
        raise LinkRefused(f"speaks version {protocol} of the control link, this store speaks {PROTOCOL}")
    ours = secrets.token_hex(16)
    frames.send(codec.dumps({"nonce": ours}))
    said = await frames.receive_object()
    try:
        role = LinkRole(said.get("role"))
        key = gate.keys[role]
    except (ValueError, KeyError):
        raise LinkRefused("unknown role") from None
    run_id, theirs = gate.welcome.run_id, str(said.get("nonce"))
    if said.get("run_id") != run_id:
        raise LinkRefused(f"belongs to run {str(said.get('run_id'))[:80]!r}, this store serves {run_id!r}")
    expected = _proof(key, "client", role, run_id, (ours, theirs))
    if len(theirs) < 32 or not hmac.compare_digest(expected.encode(), str(said.get("proof")).encode()):
        raise LinkRefused(f"wrong key for a {role.value}")
    proof = _proof(key, "server", role, run_id, (ours, theirs))
    frames.send(codec.dumps({"proof": proof, "welcome": codec.dump(gate.welcome)}))
    return Link(frames, role, gate.welcome, peer)
