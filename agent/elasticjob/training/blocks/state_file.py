"""The file of a training state: written by one node at a time, atomically, and never over a newer state.

Standard library only: agents save the blocks of their workers.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO

from elasticjob.training.blocks.state_block import ABSENT, BlockHeader, newest_block, read_content, read_header

_PIECE = 64 << 20
"""Bytes copied at a time."""


class BlockChangedError(Exception):
    """The workers overwrote the block in memory while it was copied: the file is unchanged."""


def read_file_header(path: str) -> BlockHeader:
    """Return the header of a file's block as `read_header` does; ABSENT if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return read_header(file.fileno())
    except OSError:
        return ABSENT


def save_block(descriptor: int, path: str) -> bool:
    """Write a block to a file atomically. Return False if there is no block, or the file has this state or a newer one.

    If several nodes save at the same time, one writes and the others wait for it. Where the file system has no locks
    they all write, each its own temporary file. The file is unchanged after an error: OSError if it cannot be written,
    BlockChangedError.
    """
    header = read_header(descriptor)
    if not _is_newer(header, path):
        return False
    file, temporary = _open_temporary(path)
    with file:  # its end releases the lock, so the temporary file is renamed or removed before
        try:
            if not _is_newer(header, path):  # another node has saved meanwhile
                os.unlink(temporary)  # noqa: PTH108
                return False
            _copy(descriptor, header, file)
            os.fsync(file.fileno())
            os.replace(temporary, path)  # noqa: PTH105
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
    return True


def save_to_recorded_path(descriptors: Sequence[int]) -> str:
    """Save the newest block to the path in its JSON, as `save_block` does.

    Return the path, or an empty text if nothing was saved.
    """
    index, found = newest_block(descriptors)
    if found is ABSENT:
        return ""
    content = read_content(descriptors[index], found)
    path = content.get("path") if isinstance(content, dict) else None
    return path if isinstance(path, str) and save_block(descriptors[index], path) else ""


def recorded_interval(descriptors: Sequence[int]) -> float:
    """Return the seconds between two saves that the newest block asks for; 0 without a block or such a request.

    OSError or ValueError if the block cannot be read.
    """
    index, found = newest_block(descriptors)
    content = read_content(descriptors[index], found) if found is not ABSENT else None
    minutes = content.get("save_minutes") if isinstance(content, dict) else None
    if not isinstance(minutes, (int, float)) or not math.isfinite(minutes):
        return 0.0
    return max(0.0, 60.0 * minutes)


def _is_newer(header: BlockHeader, path: str) -> bool:
    return header is not ABSENT and read_file_header(path).version < header.version


def _open_temporary(path: str) -> tuple[FileIO, str]:
    """Return the temporary file, locked and empty, and its name.

    All nodes use the same name, so that a file left by a node that died is used again. The renamed or removed file
    keeps its lock: a node that waited for it opens the name anew.
    """
    name = f"{path}.tmp"
    while True:
        file = FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            with suppress(OSError):
                os.unlink(name)  # noqa: PTH108
            own = f"{path}.{os.uname().nodename}-{os.getpid()}.tmp"
            return FileIO(own, "w"), own
        if _has_name(file, name):
            file.truncate(0)
            return file, name
        file.close()


def _has_name(file: FileIO, name: str) -> bool:
    """Return whether the open file still is the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))  # noqa: PTH116
    except FileNotFoundError:
        return False


def _copy(descriptor: int, header: BlockHeader, file: FileIO) -> None:
    """Copy a block. BlockChangedError if its header changed, which a writer changes before the rest."""
    sent = 0
    while sent < header.size and read_header(descriptor) == header:
        sent += os.sendfile(file.fileno(), descriptor, sent, min(_PIECE, header.size - sent))
    if read_header(descriptor) != header:
        raise BlockChangedError("the workers overwrote the training state while it was copied")
