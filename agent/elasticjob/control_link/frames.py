"""Frames over a TCP connection: a u32 length in network order, then that many bytes; the same in both directions.

Memory is bounded in both directions. A frame has a maximal size (`limit`). If we do not receive frames as fast as they
arrive, reading from the connection pauses, so TCP slows the peer down. A peer that does not read what we send is
disconnected, because `send` never blocks.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Any, cast

from elasticjob.contract import codec

HANDSHAKE_LIMIT = 4096
"""Bytes in one frame of a peer that is not authenticated yet."""
_LENGTH = struct.Struct("!I")
_UNSENT_FRAMES = 4
"""Frames of maximal size that a peer may leave unread before it is disconnected."""
_UNRECEIVED_FRAMES = 4
"""Frames of maximal size that we may leave unreceived before reading pauses."""


class LinkError(Exception):
    """The peer violated the protocol, and the link is closed."""


class LinkRefused(LinkError):  # noqa: N818
    """The store refused this peer, or did not prove its identity: wrong key, run or version. A retry does not help."""


class FrameProtocol(asyncio.Protocol):
    """Frames over a transport, for client and server."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.limit = HANDSHAKE_LIMIT
        """Bytes in one frame."""
        self.lost_by_keep_alive = False
        """Whether the peer vanished, so that only keep-alive detected the loss; False if either side closed."""
        self.error: LinkError | None = None
        """Why we closed the connection; None if we did not close it for an error."""
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._receiver: asyncio.Future[None] | None = None
        """Done when `receive` can go on."""
        self._closed = False
        self._paused = False
        self._unreceived = 0
        """Bytes in `_frames`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._extract_frames()
        if self._unreceived > _UNRECEIVED_FRAMES * self.limit and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _extract_frames(self) -> None:
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > self.limit:
                self.fail(f"a frame has {size} bytes; {self.limit} bytes are allowed")
                break
            if len(self._buffer) - at < _LENGTH.size + size:
                break
            at += _LENGTH.size
            self._frames.append(bytes(self._buffer[at : at + size]))
            at += size
            self._unreceived += size
        del self._buffer[:at]
        if at:
            self._wake_receiver()

    def fail(self, message: str) -> None:
        """Close the connection at once, unsent frames included; `receive` then raises LinkError(message)."""
        self.error = LinkError(message)
        self.transport.abort()
        self._wake_receiver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        # A time-out of keep-alive is an OSError; ConnectionError means that the peer's kernel closed the connection.
        self.lost_by_keep_alive = isinstance(exc, OSError) and not isinstance(exc, ConnectionError)
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

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
        if self._paused and self._unreceived <= self.limit:
            self._paused = False
            self.transport.resume_reading()
        return frame

    def send(self, frame: bytes) -> None:
        """Buffer a frame for the peer. Does nothing if the connection is closed."""
        if self.transport.is_closing():
            return
        self.transport.write(_LENGTH.pack(len(frame)) + frame)
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
