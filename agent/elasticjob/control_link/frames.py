"""Frames over a connection: u32 length (network order) and as many bytes, both ways, bounded both ways."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Any, cast

from elasticjob.contract import codec

HANDSHAKE_LIMIT = 4096
"""Bytes in one frame of a peer that has not proven itself."""
_LENGTH = struct.Struct("!I")
_UNSENT_FRAMES = 4
"""As many of the largest frames may a peer leave unread before it is dropped."""
_UNREAD_FRAMES = 4
"""As many of the largest frames may we leave unread before the peer has to wait."""


class LinkError(Exception):
    """The peer does not keep to the protocol; the link is closed."""


class LinkRefused(LinkError):  # noqa: N818
    """The store does not want this peer: wrong key, run or version. Trying again does not help."""


class FrameProtocol(asyncio.Protocol):
    """Frames over a transport, for either side."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.limit = HANDSHAKE_LIMIT
        """Bytes in one frame."""
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        self.lost_by_keep_alive = False
        """Whether the connection ended because nothing was heard any more; else the peer's kernel closed it, or we."""
        self.error: LinkError | None = None
        self._paused = False
        self._unread = 0
        """Bytes that arrived and nobody has received."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._cut()
        if self._unread > _UNREAD_FRAMES * self.limit and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _cut(self) -> None:
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > self.limit:
                self.fail(f"a frame of {size} bytes; {self.limit} are allowed")
                break
            if len(self._buffer) - at < _LENGTH.size + size:
                break
            at += _LENGTH.size
            self._frames.append(bytes(self._buffer[at : at + size]))
            at += size
            self._unread += size
        del self._buffer[:at]
        if at:
            self._wake()

    def fail(self, message: str) -> None:
        """The peer breaks the rules: close at once; whoever receives gets a LinkError."""
        self.error = LinkError(message)
        self.transport.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self.lost_by_keep_alive = isinstance(exc, OSError) and not isinstance(exc, ConnectionError)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def receive(self) -> bytes | None:
        """The next frame; None once the peer is gone and all its frames are read."""
        while not self._frames:
            if self.error is not None:
                raise self.error
            if self._closed:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        frame = self._frames.popleft()
        self._unread -= len(frame)
        if self._paused and self._unread <= self.limit:
            self._paused = False
            self.transport.resume_reading()
        return frame

    def send(self, frame: bytes) -> None:
        """Buffer a frame; nothing happens once the connection is closed."""
        if self.transport.is_closing():
            return
        self.transport.write(_LENGTH.pack(len(frame)) + frame)
        if self.transport.get_write_buffer_size() > _UNSENT_FRAMES * self.limit:
            self.fail("does not read what it is sent")

    async def receive_object(self) -> dict[str, Any]:
        """The next frame of a handshake; LinkError when there is none, LinkRefused when the peer refuses."""
        frame = await self.receive()
        if frame is None:
            raise LinkError("closed the connection during the handshake")
        data = parse_object(frame)
        if "refused" in data:
            raise LinkRefused(str(data["refused"])[:200])
        return data


def parse_object(frame: bytes) -> dict[str, Any]:
    """A JSON object; LinkError for anything else."""
    try:
        data = codec.loads(frame)
    except codec.MessageError as error:
        raise LinkError(str(error)) from None
    if not isinstance(data, dict):
        raise LinkError("want an object")
    return data
