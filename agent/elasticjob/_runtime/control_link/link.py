"""The control link: one authenticated connection on the store's port, with JSON messages in both directions.

The client is an agent or the operator. It opens the connection with the store's opcode LINK; both sides then send
frames (`frames`), first those of the handshake:

    client                                                      server
    LINK, u32 HANDSHAKE ──────────────────────────────────────►
                                           ◄─────────────────── {"nonce", "protocol"}     or {"refused": why}
    {"role", "run_id", "nonce", "proof", "macs", "protocol"} ─►
                                           ◄─────────────────── {"proof", "welcome", "mac"} or {"refused": why}
    messages                               ◄──────────────────► messages

`protocol` is the version of the messages that the sender knows. Both sides use the lower one.

A proof is an HMAC-SHA256, with the role's key, over that version, welcome, role, run id and both nonces. It shows that
its sender has the key. The nonces make it useless for another connection. The welcome, which only the server's proof
covers, distinguishes the proofs of the two sides, and cannot be changed on the way.

The same values give each direction a key of its own, which protects the messages (`frames`); the server chooses the MAC
from those that the client has. A refusal has no proof: the client counts it as a failed attempt and tries again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Message,
    UnknownMessageError,
    decode,
    encode,
    is_known,
)
from elasticjob._runtime.control_link.frames import (
    MACS,
    TAG_SIZE,
    ForgedFrame,
    FrameProtocol,
    LinkError,
    LinkRefused,
    ReceiveBudget,
)
from elasticjob._runtime.control_link.time_limit import open_within
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.connections import Peer
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive, seconds_since_answer

__all__ = ["ControlLink", "LinkError", "LinkGate", "LinkRefused", "LinkRole", "ReceiveBudget", "Welcome", "connect"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 1.5
"""Seconds for a TCP connection. An attempt towards the address of a dead store never ends; a new attempt reaches its
successor."""
HANDSHAKE_TIMEOUT = 5.0
"""Seconds in which a client must authenticate."""
HANDSHAKE = 2
"""Version of the handshake and of the frames. A store refuses a client of another version."""
UNNAMED_PROTOCOL = 2
"""Version of the messages of a peer that names none: elasticjob 0.1.0."""


class LinkRole(str, Enum):
    """Role of the client. Each role has its own key."""

    AGENT = "node"
    OPERATOR = "operator"


FRAME_LIMIT = {LinkRole.AGENT: 1024 * 1024, LinkRole.OPERATOR: 8 * 1024 * 1024}
"""Bytes in one frame, with its tag. Views of the operator and reports to it list every agent."""


@dataclass(frozen=True)
class Welcome:
    """Identity of a store."""

    run_id: str
    attempt: int
    """Execution attempt of the job."""
    incarnation: int
    passive: bool = False
    """Whether it is a standby store that decides nothing yet; `StoreActive` follows if it becomes active."""


class Decoder(Protocol):
    """Decodes the frames of a link at its own pace (`ControlLink.decoder`)."""

    async def pause(self) -> None:
        """Wait until the next frame may be decoded."""

    def turn(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a frame of at most `size` bytes, and hold it while the frame is received and decoded."""

    def is_complete(self, frame: bytes) -> bool:
        """Return whether all frames that came before this one may be dropped."""

    async def decode(self, frame: bytes) -> Message:
        """Return the message in a frame. MessageError: the frame has no valid message."""


@dataclass
class LinkGate:
    """Accepts control links on a server."""

    welcome: Welcome
    keys: Mapping[LinkRole, bytes]
    """Keys of the roles that are accepted."""
    serve: Callable[[ControlLink], Awaitable[None]]
    """Serves one authenticated link; the link is closed when it returns. An error other than LinkError ends the process
    (`loop_errors`)."""
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    passive: Callable[[], bool] = lambda: False
    """Returns whether the store is a passive standby store now."""

    async def accept(self, peer: Peer, handshake: int, rest: bytes) -> None:
        """Authenticate a connection that opened with LINK, and serve it until it closes (a `server.LinkHandler`).

        `handshake` is the client's version of the handshake, `rest` are the bytes that followed the opcode.
        """
        frames = FrameProtocol()
        frames.connection_made(peer.transport)
        peer.transport.set_protocol(frames)
        if rest:
            frames.data_received(rest)
        try:
            link = await asyncio.wait_for(_authenticate(self, frames, handshake, peer.name), HANDSHAKE_TIMEOUT)
            self.keep_alive.apply(peer.transport.get_extra_info("socket"))
        except asyncio.TimeoutError:
            peer.record_drop("handshake-timeout", "it did not authenticate in time")
        except (LinkError, OSError) as error:
            frames.send(codec.dumps({"refused": str(error)}))
            peer.record_drop("refused-link", str(error))
        except Exception as error:  # one that is not authenticated must not end the process
            log.exception("a handshake has failed")
            peer.record_drop("refused-link", f"{type(error).__name__}: {error}")
        else:
            peer.authenticated(is_agent=link.role is LinkRole.AGENT)
            await _serve(self, link, frames, peer)
        finally:
            peer.transport.close()


class ControlLink:
    """One authenticated connection, on either side."""

    def __init__(self, frames: FrameProtocol, role: LinkRole, welcome: Welcome, protocol: int, peer: str) -> None:
        self.role = role
        """Role of the client."""
        self.welcome = welcome
        """Identity of the server."""
        self.protocol = protocol
        """Version of the messages."""
        self.peer = peer
        """`host:port` of the other side."""
        self.decoder: Decoder | None = None
        """Decodes the frames if their number and size are not trusted; None: each is decoded at once."""
        self.frames = frames
        frames.limit = FRAME_LIMIT[role]

    @property
    def lost_by_keep_alive(self) -> bool:
        """Whether the link was lost because the peer vanished; False if either side closed it, or if it is open."""
        return self.frames.lost_by_keep_alive

    def seconds_since_answer(self) -> float:
        """Return the seconds since the peer's kernel last answered; infinite once the link is closed."""
        sock = self.frames.transport.get_extra_info("socket")
        return math.inf if self.frames.transport.is_closing() else seconds_since_answer(sock)

    def send(self, message: Message) -> None:
        """Buffer a message for the peer; never blocks. Does nothing if the link is closed, or if the peer is older than
        the message's type.

        A message over the frame limit closes the link, and so does a peer that leaves too much unread; `receive` then
        raises the LinkError.
        """
        if not is_known(message, self.protocol):
            return
        frame, limit = encode(message, self.protocol), self.frames.limit - TAG_SIZE
        if len(frame) > limit:
            self.frames.fail(f"a message has {len(frame)} bytes; {limit} bytes are allowed")
            return
        self.frames.send(frame)

    async def receive(self) -> Message | None:
        """Return the next message, None once the link is closed. LinkError: a frame was invalid; the link is closed."""
        while True:
            try:
                if self.decoder is not None:
                    return await self._receive_paced(self.decoder)
                frame = await self.frames.receive()
                return None if frame is None else decode(frame)
            except UnknownMessageError as error:
                log.debug("ignored a message of %s: %s", self.peer, error)
            except codec.MessageError as error:
                self.close()
                raise LinkError(str(error)) from None

    async def _receive_paced(self, decoder: Decoder) -> Message | None:
        # Frames that wait for the decoder stay with the connection, which reads no more of them than it may hold.
        await self.frames.wait()
        await decoder.pause()
        async with decoder.turn(self.frames.largest_waiting):
            frame = await self.frames.receive()
            while self.frames.waiting:
                newer = await self.frames.receive()
                if newer is not None and decoder.is_complete(newer):
                    frame = newer
            return None if frame is None else await decoder.decode(frame)

    def share(self, budget: ReceiveBudget, group: Hashable) -> None:
        """Share this budget of bytes that have arrived with other links, as one of this group (`ReceiveBudget`)."""
        self.frames.share(budget, group)

    def close(self) -> None:
        """Close the link after all buffered messages have been sent. After `share`, nothing is received any more."""
        self.frames.close()


def lower_protocol(peer: Mapping[str, Any]) -> int:
    """Return the version of the messages that both sides know. LinkRefused: the peer is too old."""
    protocol = peer.get("protocol", UNNAMED_PROTOCOL)
    if type(protocol) is not int or protocol < OLDEST_PROTOCOL:
        sent = str(protocol)[:20]
        raise LinkRefused(f"the peer uses version {sent} of the messages, this side needs version {OLDEST_PROTOCOL}")
    return min(protocol, PROTOCOL)


@dataclass(frozen=True)
class _Handshake:
    """What both sides of a connection know before the server's proof."""

    key: bytes
    protocol: int
    role: LinkRole
    run_id: str
    nonces: tuple[str, str]
    """The nonce of the server, and that of the client."""

    def client_proof(self) -> str:
        """Return what the client proves the key with. It precedes the welcome, so it covers none."""
        return self.server_proof(None)

    def server_proof(self, welcome: object) -> str:
        """Return what the server proves the key with, and that `welcome`, JSON data, is its own."""
        covered = codec.dumps((self.protocol, welcome, self.role.value, self.run_id, *self.nonces))
        return hmac.new(self.key, covered, hashlib.sha256).hexdigest()

    def frame_keys(self, mac: str, welcome: object) -> tuple[bytes, bytes]:
        """Return the keys of the frames to the server and to the client."""
        # A proof covers a list that begins with a number, so neither key is a proof.
        covered = (mac, self.protocol, welcome, self.role.value, self.run_id, *self.nonces)
        to_server, to_client = (
            hmac.digest(self.key, codec.dumps((direction, *covered)), "sha256")
            for direction in ("to server", "to client")
        )
        return to_server, to_client


def _is_proof(sent: object, expected: str) -> bool:
    # JSON may have characters that UTF-8 has not.
    return hmac.compare_digest(expected.encode(), str(sent).encode(errors="replace"))


def choose_mac(offered: object) -> str:
    """Return the best MAC of those that the other side has."""
    for mac in MACS:
        if isinstance(offered, list) and mac in offered:
            return mac
    raise LinkRefused(f"the peer has none of the MACs {', '.join(MACS)}")


# ---- client


async def connect(
    host: str,
    port: int,
    *,
    role: LinkRole,
    key: bytes,
    run_id: str,
    keep_alive: KeepAlive = KeepAlive(),  # noqa: B008  # frozen
    timeout: float = 5.0,
) -> ControlLink:
    """Connect to a store and authenticate. LinkError, OSError, TimeoutError: this attempt failed."""
    try:
        connecting = _connect(host, port, role, key, run_id, keep_alive)
        return await open_within(timeout, connecting, ControlLink.close)
    except asyncio.TimeoutError:  # another class before Python 3.11
        raise TimeoutError(f"no link to {endpoint_text(host, port)} within {timeout:g} s") from None


async def _open(host: str, port: int) -> tuple[asyncio.Transport, FrameProtocol]:
    """Connect to the first address that accepts. CONNECT_TIMEOUT applies to each address, not to name resolution."""
    loop = asyncio.get_running_loop()
    error: Exception = OSError(f"{host} has no address")
    for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            connecting = loop.create_connection(FrameProtocol, *address[:2])
            return await open_within(CONNECT_TIMEOUT, connecting, lambda opened: opened[0].abort())
        except (OSError, asyncio.TimeoutError) as failed:
            error = failed
    raise error


async def _connect(host: str, port: int, role: LinkRole, key: bytes, run_id: str, keep_alive: KeepAlive) -> ControlLink:
    transport, frames = await _open(host, port)
    try:
        keep_alive.apply(transport.get_extra_info("socket"))
        # The server's first message may arrive together with its last frame of the handshake.
        frames.limit = FRAME_LIMIT[role]
        transport.write(wire.request(wire.Op.LINK, number=HANDSHAKE))
        first = await frames.receive_object()
        nonces = str(first.get("nonce")), secrets.token_hex(16)
        handshake = _Handshake(key, lower_protocol(first), role, run_id, nonces)
        hello = {"role": role.value, "run_id": run_id, "nonce": nonces[1], "proof": handshake.client_proof()}
        frames.send(codec.dumps(hello | {"macs": MACS, "protocol": PROTOCOL}))
        answer = await frames.receive_object()
        # The proof covers the welcome as it was sent: a newer server may send fields that this side does not know.
        sent = answer.get("welcome")
        welcome = _parse_welcome(sent)
        if not _is_proof(answer.get("proof"), handshake.server_proof(sent)):
            raise LinkRefused("the store did not prove that it has the key")
        mac = choose_mac([answer.get("mac")])
        to_server, to_client = handshake.frame_keys(mac, sent)
        frames.protect(mac, send_key=to_server, receive_key=to_client)
    except BaseException:
        transport.abort()
        raise
    return ControlLink(frames, role, welcome, handshake.protocol, endpoint_text(host, port))


def _parse_welcome(sent: object) -> Welcome:
    if not isinstance(sent, dict) or not all(isinstance(value, (str, int)) for value in sent.values()):
        raise LinkError("the store sent no valid welcome")
    try:
        return codec.parse(Welcome, sent)
    except codec.MessageError as error:
        raise LinkError(str(error)) from None


# ---- server


async def _serve(gate: LinkGate, link: ControlLink, frames: FrameProtocol, peer: Peer) -> None:
    try:
        await gate.serve(link)
    except LinkError as error:
        frames.error = error
    if frames.error is not None:
        reason = "forged-frame" if isinstance(frames.error, ForgedFrame) else "bad-link"
        peer.record_drop(reason, str(frames.error))


async def _authenticate(gate: LinkGate, frames: FrameProtocol, version: int, peer: str) -> ControlLink:
    if version != HANDSHAKE:
        raise LinkRefused(f"the peer uses version {version} of the control link, this store uses version {HANDSHAKE}")
    nonce = secrets.token_hex(16)
    frames.send(codec.dumps({"nonce": nonce, "protocol": PROTOCOL}))
    answer = await frames.receive_object()
    try:
        role = LinkRole(answer.get("role"))
        key = gate.keys[role]
    except (ValueError, KeyError):
        raise LinkRefused("unknown role") from None
    run_id, client_nonce = gate.welcome.run_id, str(answer.get("nonce"))
    if answer.get("run_id") != run_id:
        # The peer has proved nothing yet, so it must not learn which run this store serves.
        raise LinkRefused(f"the peer belongs to run {str(answer.get('run_id'))[:80]!r}, this store to another one")
    handshake = _Handshake(key, lower_protocol(answer), role, run_id, (nonce, client_nonce))
    if len(client_nonce) < 32 or not _is_proof(answer.get("proof"), handshake.client_proof()):
        raise LinkRefused(f"the peer has the wrong key for role {role.value}")
    welcome = replace(gate.welcome, passive=gate.passive())
    sent, mac = codec.dump(welcome), choose_mac(answer.get("macs"))
    frames.send(codec.dumps({"proof": handshake.server_proof(sent), "welcome": sent, "mac": mac}))
    to_server, to_client = handshake.frame_keys(mac, sent)
    frames.protect(mac, send_key=to_client, receive_key=to_server)
    return ControlLink(frames, role, welcome, handshake.protocol, peer)
