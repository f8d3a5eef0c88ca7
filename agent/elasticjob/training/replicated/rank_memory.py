"""What each worker keeps for itself in the memory of its node, beside the block that all of them share.

The memory has two entries for each local rank. The older one is written while the newer one, which alone is read, stays
complete. Standard library only.
"""

from __future__ import annotations

import os
import struct

_HEADER = struct.Struct("=8sqqq")
"""Magic, sequence number, step, length of the content in bytes."""
_MAGIC = b"EJRANK01"
_ENTRY = 64 << 10
"""Bytes of an entry, with its header."""
_ABSENT = (-1, -1)


class RankMemory:
    """The entries of one local rank. Each belongs to the version of a block: its sequence number and step."""

    def __init__(self, descriptor: int, local_rank: int) -> None:
        self._descriptor = descriptor
        self._offsets = tuple((2 * local_rank + i) * _ENTRY for i in range(2))

    def write(self, version: tuple[int, int], content: bytes) -> bool:
        """Replace the older entry. Return False, and write nothing, if the content is too large."""
        if len(content) > _ENTRY - _HEADER.size:
            return False
        offset = min(self._offsets, key=lambda o: self._read(o)[0])
        os.pwrite(self._descriptor, content, offset + _HEADER.size)
        os.pwrite(self._descriptor, _HEADER.pack(_MAGIC, *version, len(content)), offset)
        return True

    def read(self) -> tuple[tuple[int, int], bytes]:
        """Return version and content of the newest entry; a step of -1 and no content if there is none."""
        return max(self._read(offset) for offset in self._offsets)

    def _read(self, offset: int) -> tuple[tuple[int, int], bytes]:
        raw = os.pread(self._descriptor, _ENTRY, offset)
        if len(raw) < _HEADER.size:
            return _ABSENT, b""
        magic, sequence, step, length = _HEADER.unpack(raw[: _HEADER.size])
        complete = magic == _MAGIC and step >= 0
        return ((sequence, step), raw[_HEADER.size : _HEADER.size + length]) if complete else (_ABSENT, b"")
