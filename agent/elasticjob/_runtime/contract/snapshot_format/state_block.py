"""A block: one training state as bytes, in memory or in a file. It has a header, JSON, and the bytes of tensors.

The JSON describes the tensors. Nothing is pickled: a reader gets numbers, text and tensors, and executes no code.
Standard library only, so that an agent can read and save the blocks of its workers.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("=8sqqqq")
"""Magic, sequence number, step, length of the JSON, size of the block."""
MAGIC = b"EJSTATE2"
_OLD_HEADER = struct.Struct("=8sqqq")
"""The header of elasticjob 0.1.0: magic, step, length of the JSON, size of the block."""
_OLD_MAGIC = b"EJSTATE1"
OLD_SEQUENCE = 0
"""The sequence number of a block of elasticjob 0.1.0: any newer block wins, and among old ones the step decides."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux."""
HEADER_SIZE = 64
"""Bytes; the JSON begins after them."""
ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple of this."""
_MAX_JSON = 1 << 28
"""Bytes of JSON that an agent reads: of a header that a script has overwritten it may be any number."""
NO_STEP = -1
"""The step of a block that is absent or incomplete."""


@dataclass(frozen=True)
class BlockHeader:
    """The header of a block."""

    sequence: int
    """The number that orders blocks (`snapshot_format.commit_sequence`)."""
    step: int
    """NO_STEP for ABSENT."""
    json_size: int
    """Length of the JSON in bytes."""
    size: int
    """Size of the whole block in bytes."""

    @property
    def version(self) -> tuple[int, int]:
        """Sequence number and step: of two blocks, the one with the higher version is newer."""
        return self.sequence, self.step


ABSENT = BlockHeader(OLD_SEQUENCE, NO_STEP, 0, 0)
"""Its version is lower than that of any block."""


def read_header(descriptor: int) -> BlockHeader:
    """Return the header of the block in memory; ABSENT if there is no complete block, or it cannot be read."""
    try:
        return read_stored_header(descriptor)
    except OSError:
        return ABSENT


def read_stored_header(descriptor: int) -> BlockHeader:
    """Return the header of the block in a file; ABSENT if there is no complete block. OSError: it cannot be read."""
    raw, size = os.pread(descriptor, HEADER.size, 0), os.fstat(descriptor).st_size
    try:
        found = _parse_header(raw)
    except struct.error:
        return ABSENT
    complete = (
        found.sequence >= 0
        and found.step >= 0
        and 0 < found.json_size <= found.size - HEADER_SIZE
        and found.size <= size
    )
    return found if complete else ABSENT


def begin_write(descriptor: int, size: int, mapped: mmap.mmap | None = None) -> mmap.mmap:
    """Return mapped memory for a block of at most `size` bytes. The block is ABSENT until `finish_write`.

    `mapped` is what this returned for the last block there; it is used again if it fits. A new mapping costs a page
    fault for every page, which takes several times as long as the copy.
    """
    _write_header(descriptor, ABSENT)
    if mapped is not None and is_mapped(descriptor, size, mapped):
        return mapped
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)


def is_mapped(descriptor: int, size: int, mapped: mmap.mmap) -> bool:
    """Return whether `mapped` is all of the file, which has this size."""
    return len(mapped) == size == os.fstat(descriptor).st_size


def populate(mapped: mmap.mmap, begin: int, size: int) -> None:
    """Let the kernel allocate the pages of a part that is written next: page faults one by one take twice as long."""
    begin -= begin % mmap.PAGESIZE
    with suppress(OSError, ValueError):  # an older kernel than Linux 5.14, or beyond the end
        mapped.madvise(_POPULATE_WRITE, begin, min(size, len(mapped) - begin))


def finish_write(descriptor: int, header: BlockHeader) -> None:
    """Write the header, after all other bytes: it makes the block complete."""
    _write_header(descriptor, header)


def read_content(descriptor: int, header: BlockHeader) -> Any:
    """Return the parsed JSON of the block with that header; OSError or ValueError if it cannot be read."""
    if header.json_size > _MAX_JSON:
        raise ValueError(f"the training state has {header.json_size} bytes of JSON, {_MAX_JSON} are read")
    try:
        return json.loads(os.pread(descriptor, header.json_size, HEADER_SIZE))
    except RecursionError:
        raise ValueError("the JSON of the training state is nested too deeply") from None


def read_block(descriptor: int) -> tuple[BlockHeader, Any, mmap.mmap]:
    """Return header, parsed JSON and all bytes (mapped copy-on-write); ValueError if there is no complete block."""
    found = read_header(descriptor)
    if found is ABSENT:
        raise ValueError("there is no complete training state")
    view = mmap.mmap(descriptor, found.size, access=mmap.ACCESS_COPY)
    return found, json.loads(view[HEADER_SIZE : HEADER_SIZE + found.json_size]), view


def newest_block(descriptors: Sequence[int]) -> tuple[int, BlockHeader]:
    """Return the index of the newest block, and its header; ABSENT if no block is complete."""
    headers = [read_header(descriptor) for descriptor in descriptors]
    index = max(range(len(headers)), key=lambda i: headers[i].version)
    return index, headers[index]


def data_start(json_size: int) -> int:
    """Return the offset of the tensors in a block with that many bytes of JSON."""
    return -(-(HEADER_SIZE + json_size) // ALIGNMENT) * ALIGNMENT


def _parse_header(raw: bytes) -> BlockHeader:
    """Return the header as it stands there; ABSENT for another format, struct.error for too few bytes."""
    if raw.startswith(_OLD_MAGIC):
        _, step, json_size, size = _OLD_HEADER.unpack(raw[: _OLD_HEADER.size])
        return BlockHeader(OLD_SEQUENCE, step, json_size, size)
    magic, sequence, step, json_size, size = HEADER.unpack(raw)
    return BlockHeader(sequence, step, json_size, size) if magic == MAGIC else ABSENT


def _write_header(descriptor: int, header: BlockHeader) -> None:
    packed = HEADER.pack(MAGIC, header.sequence, header.step, header.json_size, header.size)
    os.pwrite(descriptor, packed, 0)
