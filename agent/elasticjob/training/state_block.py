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
START = 64
"""Where the JSON begins."""
ALIGN = 64
NONE = -1
"""The step of a block that is not there, or not whole."""


@dataclass(frozen=True)
class Head:
    """The first words of a block; sizes in bytes."""

    step: int
    text: int
    size: int


ABSENT = Head(NONE, 0, 0)


def head(descriptor: int) -> Head:
    """What a file or memory holds; ABSENT where that is no whole block."""
    try:
        raw = os.pread(descriptor, _WORDS.size, 0)
        magic, step, text, size = _WORDS.unpack(raw)
        whole = magic == _MAGIC and step >= 0 and 0 < text <= size - START and size <= os.fstat(descriptor).st_size
    except (OSError, struct.error):
        return ABSENT
    return Head(step, text, size) if whole else ABSENT


def begin(descriptor: int, size: int) -> mmap.mmap:
    """Make room for a block of `size` bytes, which is not there until `finish`."""
    os.pwrite(descriptor, _WORDS.pack(_MAGIC, NONE, 0, 0), 0)
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)


def finish(descriptor: int, whole: Head) -> None:
    """All bytes of the block are written."""
    os.pwrite(descriptor, _WORDS.pack(_MAGIC, whole.step, whole.text, whole.size), 0)


def read(descriptor: int) -> tuple[Head, Any, mmap.mmap]:
    """Head, JSON and all bytes (a private copy, page by page as it is written to). ValueError where there is none."""
    found = head(descriptor)
    if found is ABSENT:
        raise ValueError("no whole training state")
    view = mmap.mmap(descriptor, found.size, access=mmap.ACCESS_COPY)
    return found, json.loads(view[START : START + found.text]), view


def newest(descriptors: Sequence[int]) -> tuple[int, Head]:
    """The index with the latest step, and its head; ABSENT where none has a whole block."""
    heads = [head(descriptor) for descriptor in descriptors]
    index = max(range(len(heads)), key=lambda i: heads[i].step)
    return index, heads[index]


def head_of_file(path: str) -> Head:
    """As `head`; a file that cannot be read is ABSENT."""
    try:
        with open(path, "rb") as file:
            return head(file.fileno())
    except OSError:
        return ABSENT


def save(descriptor: int, path: str) -> bool:
    """Copy a block to a file, all or nothing, unless that holds this step or a later one. OSError as of any file."""
    found = head(descriptor)
    if found is ABSENT or head_of_file(path).step >= found.step:
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


def save_where_it_says(descriptors: Sequence[int]) -> str:
    """Save the newest block to the path that it names; that path, or nothing where none was to be saved."""
    index, found = newest(descriptors)
    if found is ABSENT:
        return ""
    text = json.loads(os.pread(descriptors[index], found.text, START))
    path = text.get("path") if isinstance(text, dict) else None
    return path if isinstance(path, str) and save(descriptors[index], path) else ""
