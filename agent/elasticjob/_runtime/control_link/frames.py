"""Frames over a TCP connection: a u32 length in network order, then that many bytes; the same in both directions.

Once the handshake has agreed on keys (`protect`), a frame ends with its tag: a MAC, with the key of its direction, over
all frames of that direction from the first to this one, without their tags. So the tag depends on the frame's place,
and a frame that was changed, injected, repeated, omitted or reordered on the way ends the connection.

Memory is bounded in both directions. A frame has a maximal size (`limit`). If we do not receive frames as fast as they
arrive, reading from the connection pauses, so TCP slows the peer down. A peer that does not read what we send is
disconnected, because `send` never blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol, cast

from elasticjob._runtime.contract import codec

HANDSHAKE_LIMIT = 4096
"""Bytes in one frame of a peer that is not authenticated yet."""
_LENGTH = struct.Struct("!I")
TAG_SIZE = 16
"""Bytes in a frame's tag."""
_UNSENT_FRAMES = 4
"""Frames of maximal size that a peer may leave unread before it is disconnected."""
STALL_SECONDS = 10.0
"""Seconds without a byte after which a part of a frame that counts in a budget is given up. The peer sends a frame as a
whole, so only the network delays the rest: five losses of a packet in a row take TCP 6 s. A link that is closed costs
little, because an honest peer sends its report again over the next one."""
_UNRECEIVED_FRAMES = 4
"""Frames of maximal size that we may leave unreceived before reading pauses."""


class LinkError(Exception):
    """The peer violated the protocol, and the link is closed."""


class LinkRefused(LinkError):  # noqa: N818
    """The other side refused this peer, or did not prove its identity: wrong key, run or version.

    A refusal has no proof, because the two sides may have no key in common: it may come from an impostor. So it ends
    an attempt to connect, and nothing else.
    """


class ForgedFrame(LinkError):  # noqa: N818
    """A frame has a wrong tag: it does not come from the peer, or not at this point."""


class Mac(Protocol):
    """A keyed hash of a stream, as `hashlib` and `hmac` have it. `digest` covers all data so far."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


def blake2b_mac(key: bytes) -> Mac:
    return hashlib.blake2b(key=key, digest_size=TAG_SIZE)


def _hmac_sha256(key: bytes) -> Mac:
    return hmac.new(key, digestmod="sha256")


def is_available(new_mac: Callable[[bytes], Mac]) -> bool:
    try:
        new_mac(b"key")
    except (AttributeError, ValueError):
        return False
    return True


_CONSTRUCTORS = {"blake2b": blake2b_mac, "hmac-sha256": _hmac_sha256}
MACS = tuple(name for name, new_mac in _CONSTRUCTORS.items() if is_available(new_mac))
"""Names of the MACs that this Python has, the best first. BLAKE2b takes a third of the time; Python has no BLAKE2b on a
host that is restricted to the algorithms of FIPS."""


class ReceiveBudget:
    """Bytes that several connections may hold together of what has arrived.

    Each connection belongs to a group. Over the limit, the largest connection of the group that holds most is closed:
    other groups do not suffer from it, whether that group has a few large connections or many small ones.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        """Bytes that all connections hold now."""
        self._groups: dict[Hashable, dict[FrameProtocol, int]] = {}
        """By group: the bytes that each connection holds. A group without connections has no entry."""
        self._totals: dict[Hashable, int] = {}
        """By group, with the same keys: the bytes that its connections hold together."""

    def hold(self, connection: FrameProtocol, group: Hashable, size: int) -> None:
        """Record how many bytes a connection of this group holds now."""
        held = self._groups.setdefault(group, {})
        added = size - held.pop(connection, 0)
        if size:
            held[connection] = size
        self.total += added
        self._totals[group] = self._totals.get(group, 0) + added
        if not held:
            del self._groups[group], self._totals[group]
        while self.total > self.limit:
            self._close_largest(max(self._totals, key=lambda other: self._totals[other]))

    def _close_largest(self, group: Hashable) -> None:
        held = self._groups[group]
        largest = max(held, key=lambda other: held[other])
        size, together = held[largest], self._totals[group]
        largest.discard()  # which calls `hold` with 0
        largest.fail(
            f"{size} bytes from it wait, {together} bytes with others of {group}, "
            f"and all connections together may hold {self.limit}"
        )


class FrameProtocol(asyncio.Protocol):
    """Frames over a transport, for client and server."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.limit = HANDSHAKE_LIMIT
        """Bytes in one frame, with its tag."""
        self.lost_by_keep_alive = False
        """Whether the peer vanished, so that only keep-alive detected the loss; False if either side closed."""
        self.error: LinkError | None = None
        """Why we closed the connection; None if we did not close it for an error."""
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        """Frames that have arrived, with their lengths and tags."""
        self._receiver: asyncio.Future[None] | None = None
        """Done when `receive` can go on."""
        self._closed = False
        self._paused = False
        self._unreceived = 0
        """Bytes in `_frames`."""
        self._budget: ReceiveBudget | None = None
        self._group: Hashable = None
        """Group of this connection in the budget."""
        self._stalled: asyncio.TimerHandle | None = None
        """With a budget: closes the connection if the rest of an incomplete frame does not arrive."""
        self.send_mac: Mac | None = None
        """Covers all frames sent; None during the handshake."""
        self.receive_mac: Mac | None = None
        """Covers all frames received; None during the handshake."""

    def protect(self, mac: str, send_key: bytes, receive_key: bytes) -> None:
        """Add a tag to every frame that is sent from now on, and require one of every frame received from now on.

        `mac`: one of `MACS`.
        """
        self.send_mac, self.receive_mac = _CONSTRUCTORS[mac](send_key), _CONSTRUCTORS[mac](receive_key)

    def share(self, budget: ReceiveBudget, group: Hashable) -> None:
        """Share this budget with other connections, as one of this group.

        Reading then pauses at one frame of maximal size, and the connection is closed if the rest of a frame does not
        go on arriving (`STALL_SECONDS`).
        """
        self._budget, self._group = budget, group
        self._account()
        self._watch_progress()

    def discard(self) -> None:
        """Forget what has arrived and was not received."""
        self._buffer.clear()
        self._frames.clear()
        self._unreceived = 0
        self._account()
        self._watch_progress()

    def close(self) -> None:
        """Close the connection after all buffered frames have been sent.

        With a budget, nothing is received any more: what has arrived is forgotten. The end of the connection alone does
        not do that, because the last frames of a peer that closes it are still to be received.
        """
        self.transport.close()
        if self._budget is not None:
            self.discard()
            self._budget = None
            self._closed = True
            self._wake_receiver()

    def _account(self) -> None:
        if self._budget is not None:
            self._budget.hold(self, self._group, len(self._buffer) + self._unreceived)

    def _watch_progress(self) -> None:
        """Begin again to wait for the rest of a frame, if a part of one has arrived and more is read."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._budget is not None and self._buffer and not self._paused and self.error is None:
            message = f"{len(self._buffer)} bytes of a frame have arrived, and no more within {STALL_SECONDS:g} s"
            self._stalled = asyncio.get_running_loop().call_later(STALL_SECONDS, self.fail, message)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._extract_frames()
        if self.receive_mac is None and len(self._buffer) + self._unreceived > _UNRECEIVED_FRAMES * self.limit:
            self.fail("it sent too much during the handshake")
        elif self._unreceived > (_UNRECEIVED_FRAMES if self._budget is None else 1) * self.limit and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._account()
        self._watch_progress()

    def _extract_frames(self) -> None:
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > self.limit:
                self.fail(f"a frame has {size} bytes; {self.limit} bytes are allowed")
                break
            if len(self._buffer) - at < _LENGTH.size + size:
                break
            end = at + _LENGTH.size + size
            self._frames.append(bytes(self._buffer[at:end]))
            self._unreceived += end - at
            at = end
        del self._buffer[:at]
        if at:
            self._wake_receiver()

    def fail(self, message: str) -> None:
        """Close the connection at once, unsent frames included; `receive` then raises LinkError(message)."""
        self._fail(LinkError(message))

    def _fail(self, error: LinkError) -> None:
        self.error = error
        self.transport.abort()
        self._wake_receiver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        # A time-out of keep-alive is an OSError; ConnectionError means that the peer's kernel closed the connection.
        self.lost_by_keep_alive = isinstance(exc, OSError) and not isinstance(exc, ConnectionError)
        self._buffer.clear()  # a part of a frame
        self._account()
        self._watch_progress()
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    @property
    def waiting(self) -> bool:
        """Whether `receive` returns a frame at once."""
        return bool(self._frames)

    @property
    def largest_waiting(self) -> int:
        """Bytes of the largest frame that waits, with its length and tag; 0 without one."""
        return max(map(len, self._frames), default=0)

    async def wait(self) -> None:
        """Wait until `receive` returns at once, or raises."""
        while not (self._frames or self.error is not None or self._closed):
            self._receiver = asyncio.get_running_loop().create_future()
            await self._receiver

    async def receive(self) -> bytes | None:
        """Return the next frame, None once the connection is closed and all its frames are received."""
        while not self._frames:
            if self.error is not None:
                raise self.error
            if self._closed:
                return None
            self._receiver = asyncio.get_running_loop().create_future()
            await self._receiver
        frame = self._frames.popleft()
        self._unreceived -= len(frame)
        self._account()
        if self._paused and self._unreceived <= self.limit:
            self._paused = False
            self.transport.resume_reading()
            self._watch_progress()
        # Here and in `send` without further calls: a rendezvous of thousands of agents has as many short frames.
        mac = self.receive_mac
        if mac is None:
            return frame[_LENGTH.size :]
        mac.update(frame[:-TAG_SIZE])
        if not hmac.compare_digest(frame[-TAG_SIZE:], mac.digest()[:TAG_SIZE]):
            raise self._forged()
        return frame[_LENGTH.size : -TAG_SIZE]

    def _forged(self) -> ForgedFrame:
        """Close the connection and return the reason."""
        self.discard()
        error = ForgedFrame("a frame was changed, injected or omitted on the way: its tag is wrong")
        self._fail(error)
        return error

    def send(self, frame: bytes) -> None:
        """Buffer a frame for the peer. Does nothing if the connection is closed."""
        if self.transport.is_closing():
            return
        mac = self.send_mac
        if mac is None:
            self.transport.write(_LENGTH.pack(len(frame)) + frame)
        else:
            data = _LENGTH.pack(len(frame) + TAG_SIZE) + frame
            mac.update(data)
            self.transport.write(data + mac.digest()[:TAG_SIZE])
        if self.transport.get_write_buffer_size() > _UNSENT_FRAMES * self.limit:
            self.fail("the peer does not read its messages")

    async def receive_object(self) -> dict[str, Any]:
        """Return the next frame of a handshake. LinkRefused: the peer refuses; LinkError: there is no valid frame."""
        frame = await self.receive()
        if frame is None:
            raise LinkError("the peer closed the connection during the handshake")
        data = _parse_object(frame)
        if "refused" in data:
            raise LinkRefused(str(data["refused"])[:200])
        return data


def _parse_object(frame: bytes) -> dict[str, Any]:
    try:
        data = codec.loads(frame)
    except codec.MessageError as error:
        raise LinkError(str(error)) from None
    if not isinstance(data, dict):
        raise LinkError("want an object")
    return data
