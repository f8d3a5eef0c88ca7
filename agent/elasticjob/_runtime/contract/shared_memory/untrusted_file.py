"""Files that a worker may write at any time, and may replace by something else."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple


class FileContent(NamedTuple):
    """What was read of a file."""

    data: bytes
    time: float
    """When the file was changed last, Unix seconds."""


def read_regular_file(path: str, limit: int, start: int = 0) -> FileContent:
    """Return up to `limit` bytes of a regular file, from the offset `start` on. OSError: it is missing, or another kind
    of file.

    A FIFO or a terminal would block the event loop until another process writes to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")
        return FileContent(os.pread(descriptor, limit, start), found.st_mtime)
    finally:
        os.close(descriptor)
