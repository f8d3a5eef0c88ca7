"""The control link: one authenticated connection on the store's port, JSON messages both ways.

    client                                server
    LINK, u32 protocol ──────────────────►
    ◄──────────────────────────────────── {"nonce"}                      or {"refused"}
    {"role", "run_id", "nonce", "proof"} ►
    ◄──────────────────────────────────── {"proof", "welcome"}           or {"refused"}
    messages ◄───────────────────────────► messages

A proof is HMAC-SHA256 with the role's key over protocol, direction, role, run id and both nonces: neither side talks
to one that does not have the key, and no proof can be used again or sent back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from elasticjob.contract import codec
from elasticjob.contract.messages import PROTOCOL, Message, decode, encode
from elasticjob.control_link.frames import FrameProtocol, LinkError, LinkRefused
from elasticjob.keep_alive import KeepAlive
from elasticjob.store import wire
from elasticjob.store.server import Drop

__all__ = ["ControlLink", "LinkError", "LinkGate", "LinkRefused", "LinkRole", "Welcome", "connect"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 1.5
"""Seconds for a connection to come about: one that began to go to a dead store's address never does, the next will."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a peer has to prove itself."""


class LinkRole(str, Enum):
    """Who is at the other end, and with which key it proves that."""

    NODE = "node"
    OPERATOR = "operator"


FRAME_LIMIT = {LinkRole.NODE: 1024 * 1024, LinkRole.OPERATOR: 8 * 1024 * 1024}
"""Bytes in one frame. Reports to the operator are as large as its facts."""


@dataclass(frozen=True)
class Welcome:
    """Who the store is."""

    run_id: str
    attempt: int
    incarnation: int


@dataclass
class LinkGate:
    """What a server needs to accept links; `serve` gets each one that has proven itself."""

    welcome: Welcome
    keys: Mapping[LinkRole, bytes]
    serve: Callable[[ControlLink], Awaitable[None]]
    keep_alive: KeepAlive = field(default_factory=KeepAlive)

    async def accept(self, transport: asyncio.Transport, protocol: int, rest: bytes, drop: Drop) -> None:
        """Take over a connection that asked to become a link: prove each other, then serve it until it closes.

        `protocol`: the client's version of the control link; `rest`: what it has sent since; `drop`: counts refusals.
        """
        frames = FrameProtocol()
        frames.connection_made(transport)
        transport.set_protocol(frames)
        if rest:
            frames.data_received(rest)
        address = transport.get_extra_info("peername") or ("?", 0)
        peer = f"{address[0]}:{address[1]}"
        try:
            self.keep_alive.apply(transport.get_extra_info("socket"))
            link = await asyncio.wait_for(_prove(self, frames, protocol, peer), HANDSHAKE_TIMEOUT)
        except asyncio.TimeoutError:
            drop("handshake-timeout", peer, "did not prove itself in time")
        except (LinkError, OSError) as error:
            frames.send(codec.dumps({"refused": str(error)}))
            drop("refused-link", peer, str(error))
        else:
            await _serve(self, link, frames, drop)
        finally:
            transport.close()


class ControlLink:
    """One authenticated connection, either side."""

    def __init__(self, frames: FrameProtocol, role: LinkRole, welcome: Welcome, peer: str) -> None:
        self.role = role
        self.welcome = welcome
        self.peer = peer
        self._frames = frames
        frames.limit = FRAME_LIMIT[role]

    @property
    def lost_by_keep_alive(self) -> bool:
        """Whether the link was lost because the peer vanished without a word."""
        return self._frames.lost_by_keep_alive

    def send(self, message: Message) -> None:
        """Buffer a message for the peer; dropped when the link is closed. Never blocks.

        A message over the frame limit, or a peer that leaves too much unread, closes the link; `receive` says which.
        """
        frame = encode(message)
        if len(frame) > self._frames.limit:
            self._frames.fail(f"a message of {len(frame)} bytes; {self._frames.limit} are allowed")
            return
        self._frames.send(frame)

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


def _proof(key: bytes, welcome: Welcome | None, role: LinkRole, run_id: str, nonces: tuple[str, str]) -> str:
    """The server's proof covers its welcome; the client's has none, so neither can be taken for the other."""
    covered = codec.dumps((PROTOCOL, codec.dump(welcome), role.value, run_id, *nonces))
    return hmac.new(key, covered, hashlib.sha256).hexdigest()


# ---- the client's side


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
    """A link to a store. LinkRefused: do not try again; LinkError, OSError, TimeoutError: do."""
    try:
        return await asyncio.wait_for(_connect(host, port, role, key, run_id, keep_alive), timeout)
    except asyncio.TimeoutError:  # another class before Python 3.11
        raise TimeoutError(f"no link to {host}:{port} within {timeout:g} s") from None


async def _open(host: str, port: int) -> tuple[asyncio.Transport, FrameProtocol]:
    """To the first address that answers; looking the name up takes the time that it takes."""
    loop = asyncio.get_running_loop()
    error: Exception = OSError(f"{host} has no address")
    for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await asyncio.wait_for(loop.create_connection(FrameProtocol, *address[:2]), CONNECT_TIMEOUT)
        except (OSError, asyncio.TimeoutError) as failed:
            error = failed
    raise error


async def _connect(host: str, port: int, role: LinkRole, key: bytes, run_id: str, keep_alive: KeepAlive) -> ControlLink:
    transport, frames = await _open(host, port)
    try:
        keep_alive.apply(transport.get_extra_info("socket"))
        # Its first message may come together with the last frame of the handshake.
        frames.limit = FRAME_LIMIT[role]
        transport.write(wire.request(wire.Op.LINK, number=PROTOCOL))
        theirs = str((await frames.receive_object()).get("nonce"))
        ours = secrets.token_hex(16)
        proof = _proof(key, None, role, run_id, (theirs, ours))
        frames.send(codec.dumps({"role": role.value, "run_id": run_id, "nonce": ours, "proof": proof}))
        answer = await frames.receive_object()
        welcome = _parse_welcome(answer)
        expected = _proof(key, welcome, role, run_id, (theirs, ours))
        if not hmac.compare_digest(expected.encode(), str(answer.get("proof")).encode()):
            raise LinkRefused("the store did not prove that it has the key")
    except BaseException:
        transport.abort()
        raise
    return ControlLink(frames, role, welcome, f"{host}:{port}")


def _parse_welcome(answer: dict[str, Any]) -> Welcome:
    try:
        return codec.parse(Welcome, answer.get("welcome"))
    except codec.MessageError as error:
        raise LinkError(str(error)) from None


# ---- the server's side


async def _serve(gate: LinkGate, link: ControlLink, frames: FrameProtocol, drop: Drop) -> None:
    try:
        await gate.serve(link)
    except LinkError as error:
        frames.error = error
    except Exception:
        log.exception("serving %s", link.peer)
    if frames.error is not None:
        drop("bad-link", link.peer, str(frames.error))


async def _prove(gate: LinkGate, frames: FrameProtocol, protocol: int, peer: str) -> ControlLink:
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
    expected = _proof(key, None, role, run_id, (ours, theirs))
    if len(theirs) < 32 or not hmac.compare_digest(expected.encode(), str(said.get("proof")).encode()):
        raise LinkRefused(f"wrong key for a {role.value}")
    proof = _proof(key, gate.welcome, role, run_id, (ours, theirs))
    frames.send(codec.dumps({"proof": proof, "welcome": codec.dump(gate.welcome)}))
    return ControlLink(frames, role, gate.welcome, peer)
