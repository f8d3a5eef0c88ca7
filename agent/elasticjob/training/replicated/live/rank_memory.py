"""What each worker keeps for itself in the memory of its pod, in addition to the block that all of them share.

The memory has three entries for each local rank: for the newest commit that is complete, for the one after it, whose
copy may be under way, and for the next one, which a rank may begin before the writer of that copy. Standard library
only.
"""

from __future__ import annotations

import os
import struct

_HEADER = struct.Struct("=8sqqq")
"""Magic, sequence number, step, length of the content in bytes."""
_MAGIC = b"EJRANK01"
_ENTRY = 64 << 10
"""Bytes of an entry, with its header."""
_ENTRIES = 3
_ABSENT = (-1, -1)


class RankMemory:
    """The entries of one local rank. Each belongs to the version of a block: its sequence number and step."""

    def __init__(self, descriptor: int, local_rank: int) -> None:
        self._descriptor = descriptor
        self._offsets = tuple((_ENTRIES * local_rank + i) * _ENTRY for i in range(_ENTRIES))

    def write(self, version: tuple[int, int], content: bytes, *, protected: tuple[int, int] = _ABSENT) -> bool:
        """Replace the oldest entry, but not that of the version `protected`.

        Return False if the content is too large for an entry.
        """
        if len(content) > _ENTRY - _HEADER.size:
            return False
        found = {offset: self._read(offset)[0] for offset in self._offsets}
        offset = min(found, key=lambda o: (found[o] == protected != _ABSENT, found[o]))
        os.pwrite(self._descriptor, bytes(_HEADER.size), offset)  # it does not count until it is complete
        os.pwrite(self._descriptor, content, offset + _HEADER.size)
        os.pwrite(self._descriptor, _HEADER.pack(_MAGIC, *version, len(content)), offset)
        return True

    def read(self, version: tuple[int, int] | None = None) -> tuple[tuple[int, int], bytes]:
        """Return version and content of the newest entry, or of that of a version; a step of -1 if there is none."""
        entries = [self._read(offset) for offset in self._offsets]
        return max((entry for entry in entries if version in (None, entry[0])), default=(_ABSENT, b""))

    def _read(self, offset: int) -> tuple[tuple[int, int], bytes]:
        raw = os.pread(self._descriptor, _ENTRY, offset)
        if len(raw) < _HEADER.size:
            return _ABSENT, b""
        magic, sequence, step, length = _HEADER.unpack(raw[: _HEADER.size])
        complete = magic == _MAGIC and step >= 0
        return ((sequence, step), raw[_HEADER.size : _HEADER.size + length]) if complete else (_ABSENT, b"")
