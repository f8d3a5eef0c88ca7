"""One training state as bytes, in memory or in a file: what it is, JSON that says what the bytes mean, the bytes.

Nothing is pickled: whoever reads a block gets numbers, text and tensors, and runs nothing. Standard library only, so
that an agent can read and save what its workers left.
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

_WORDS = struct.Struct("=8sqqq")
"""Magic, step, length of the JSON, size of the whole."""
_MAGIC = b"EJSTATE1"
HEADER_SIZE = 64
"""Where the JSON begins."""
ALIGNMENT = 64
NO_STEP = -1
"""The step of a block that is not there, or not whole."""


@dataclass(frozen=True)
class BlockHeader:
    """The first words of a block; sizes in bytes."""

    step: int
    text: int
    size: int


ABSENT = BlockHeader(NO_STEP, 0, 0)


def read_header(descriptor: int) -> BlockHeader:
    """What a file or memory holds; ABSENT where that is no whole block."""
    try:
        raw = os.pread(descriptor, _WORDS.size, 0)
        magic, step, text, size = _WORDS.unpack(raw)
        whole = (
            magic == _MAGIC and step >= 0 and 0 < text <= size - HEADER_SIZE and size <= os.fstat(descriptor).st_size
        )
    except (OSError, struct.error):
        return ABSENT
    return BlockHeader(step, text, size) if whole else ABSENT


def begin_write(descriptor: int, size: int) -> mmap.mmap:
    """Make room for a block of `size` bytes, which is not there until `finish`."""
    os.pwrite(descriptor, _WORDS.pack(_MAGIC, NO_STEP, 0, 0), 0)
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)


def finish_write(descriptor: int, whole: BlockHeader) -> None:
    """All bytes of the block are written."""
    os.pwrite(descriptor, _WORDS.pack(_MAGIC, whole.step, whole.text, whole.size), 0)


def read_block(descriptor: int) -> tuple[BlockHeader, Any, mmap.mmap]:
    """Head, JSON and all bytes (a private copy, page by page as it is written to). ValueError where there is none."""
    found = read_header(descriptor)
    if found is ABSENT:
        raise ValueError("no whole training state")
    view = mmap.mmap(descriptor, found.size, access=mmap.ACCESS_COPY)
    return found, json.loads(view[HEADER_SIZE : HEADER_SIZE + found.text]), view


def newest_block(descriptors: Sequence[int]) -> tuple[int, BlockHeader]:
    """The index with the latest step, and its head; ABSENT where none has a whole block."""
    heads = [read_header(descriptor) for descriptor in descriptors]
    index = max(range(len(heads)), key=lambda i: heads[i].step)
    return index, heads[index]


def read_file_header(path: str) -> BlockHeader:
    """As `head`; a file that cannot be read is ABSENT."""
    try:
        with open(path, "rb") as file:
            return read_header(file.fileno())
    except OSError:
        return ABSENT


def save_block(descriptor: int, path: str) -> bool:
    """Copy a block to a file, all or nothing, unless that holds this step or a later one. OSError as of any file."""
    found = read_header(descriptor)
    if found is ABSENT or read_file_header(path).step >= found.step:
        return False
    draft = f"{path}.{os.uname().nodename}-{os.getpid()}.tmp"
    try:
        with open(draft, "wb") as file:
            sent = 0
            while sent < found.size:
                sent += os.sendfile(file.fileno(), descriptor, sent, found.size - sent)
            os.fsync(file.fileno())
        os.replace(draft, path)  # noqa: PTH105
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)  # noqa: PTH108
        raise
    return True


def save_to_recorded_path(descriptors: Sequence[int]) -> str:
    """Save the newest block to the path that it names; that path, or nothing where none was to be saved."""
    index, found = newest_block(descriptors)
    if found is ABSENT:
        return ""
    text = json.loads(os.pread(descriptors[index], found.text, HEADER_SIZE))
    path = text.get("path") if isinstance(text, dict) else None
    return path if isinstance(path, str) and save_block(descriptors[index], path) else ""
