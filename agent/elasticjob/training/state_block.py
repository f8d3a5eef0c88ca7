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

_HEADER = struct.Struct("=8sqqq")
"""Magic, step, length of the JSON, size of the block."""
_MAGIC = b"EJSTATE1"
HEADER_SIZE = 64
"""Bytes; the JSON begins after them."""
ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple of this."""
NO_STEP = -1
"""The step of a block that is absent or incomplete."""


@dataclass(frozen=True)
class BlockHeader:
    """The header of a block."""

    step: int
    """NO_STEP for ABSENT."""
    json_size: int
    """Length of the JSON in bytes."""
    size: int
    """Size of the whole block in bytes."""


ABSENT = BlockHeader(NO_STEP, 0, 0)


def read_header(descriptor: int) -> BlockHeader:
    """Return the header of the block in a file or memory; ABSENT if there is no complete block."""
    try:
        raw = os.pread(descriptor, _HEADER.size, 0)
        magic, step, json_size, size = _HEADER.unpack(raw)
        complete = (
            magic == _MAGIC
            and step >= 0
            and 0 < json_size <= size - HEADER_SIZE
            and size <= os.fstat(descriptor).st_size
        )
    except (OSError, struct.error):
        return ABSENT
    return BlockHeader(step, json_size, size) if complete else ABSENT


def begin_write(descriptor: int, size: int) -> mmap.mmap:
    """Map memory for a block of `size` bytes. The block is ABSENT until `finish_write`."""
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, NO_STEP, 0, 0), 0)
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)


def finish_write(descriptor: int, header: BlockHeader) -> None:
    """Write the header, after all other bytes: it makes the block complete."""
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, header.step, header.json_size, header.size), 0)


def read_block(descriptor: int) -> tuple[BlockHeader, Any, mmap.mmap]:
    """Return header, parsed JSON and all bytes (mapped copy-on-write); ValueError if there is no complete block."""
    found = read_header(descriptor)
    if found is ABSENT:
        raise ValueError("there is no complete training state")
    view = mmap.mmap(descriptor, found.size, access=mmap.ACCESS_COPY)
    return found, json.loads(view[HEADER_SIZE : HEADER_SIZE + found.json_size]), view


def newest_block(descriptors: Sequence[int]) -> tuple[int, BlockHeader]:
    """Return the index of the block with the latest step, and its header; ABSENT if no block is complete."""
    headers = [read_header(descriptor) for descriptor in descriptors]
    index = max(range(len(headers)), key=lambda i: headers[i].step)
    return index, headers[index]


def read_file_header(path: str) -> BlockHeader:
    """Return the header of a file's block as `read_header` does; ABSENT if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return read_header(file.fileno())
    except OSError:
        return ABSENT


def save_block(descriptor: int, path: str) -> bool:
    """Write a block to a file atomically. Return False if there is no block, or the file has this step or a later one.

    OSError if the file cannot be written; the file is unchanged then.
    """
    found = read_header(descriptor)
    if found is ABSENT or read_file_header(path).step >= found.step:
        return False
    temporary = f"{path}.{os.uname().nodename}-{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            sent = 0
            while sent < found.size:
                sent += os.sendfile(file.fileno(), descriptor, sent, found.size - sent)
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    return True


def save_to_recorded_path(descriptors: Sequence[int]) -> str:
    """Save the newest block to the path in its JSON. Return the path, or an empty text if nothing was saved."""
    index, found = newest_block(descriptors)
    if found is ABSENT:
        return ""
    content = json.loads(os.pread(descriptors[index], found.json_size, HEADER_SIZE))
    path = content.get("path") if isinstance(content, dict) else None
    return path if isinstance(path, str) and save_block(descriptors[index], path) else ""
