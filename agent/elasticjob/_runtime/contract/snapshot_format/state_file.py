"""The file of a training state: written by one pod at a time, atomically, and never over a newer state.

Standard library only: agents save the blocks of their workers.

The file may be on NFS, where other clients replace files under open descriptors (ESTALE), where a client may know the
names in a folder of up to a minute ago, and where a call that a server has executed may be reported as failed, because
its answer was lost and the server does not recognize the second request.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO

from elasticjob._runtime.contract.snapshot_format.state_block import (
    ABSENT,
    BlockHeader,
    newest_block,
    read_content,
    read_header,
    read_stored_header,
)

_PIECE = 64 << 20
"""Bytes copied at a time."""
LOCK_TIMEOUT = 60.0
"""Seconds to wait for the lock of a file that does not grow. NFS clients may see its size up to 60 s late."""
_LOCK_INTERVAL = 0.05
_PRIVATE = 0o600
"""The mode of the shared temporary file until it is complete: another user who can open a file can lock it for ever."""
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: another user may have made a pipe of that name; it changes nothing for a regular file."""
_STALE_ATTEMPTS = 10
"""How often a file is opened again that another NFS client has replaced since."""
_LONGEST_INTERVAL = 60 * 24 * 366
"""Minutes."""


class BlockChangedError(Exception):
    """The workers overwrote the block in memory while it was copied: the file is unchanged."""


def read_file_header(path: str) -> BlockHeader:
    """Return the header of a file's block; ABSENT if there is no such file, or no complete block in it.

    OSError: the file cannot be read. It may have a newer state than any other place, so it does not count as absent.
    """
    for left in reversed(range(_STALE_ATTEMPTS)):
        try:
            with FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:  # it may be a pipe
                is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                return read_stored_header(file.fileno()) if is_file else ABSENT
        except FileNotFoundError:
            return ABSENT
        except OSError as error:
            if error.errno != errno.ESTALE or not left:
                raise
    raise AssertionError("the last attempt returns or raises")


def save_block(descriptor: int, path: str) -> bool:
    """Write a block to a file atomically. Return False if there is no block, or the file has this state or a newer one.

    If several pods save at the same time, one writes and the others wait for it. Where the file system has no locks,
    or another process keeps the lock, they all write, each its own temporary file. An error leaves the file unchanged:
    OSError if it cannot be written, BlockChangedError.
    """
    header = read_header(descriptor)
    if not _is_newer(header, path):
        return False
    file, temporary, mode = _open_temporary(path)
    with file:  # its end releases the lock, so the temporary file is renamed or removed before
        try:
            # Another pod may have saved meanwhile. An NFS client sees its file here: it has created a file in the
            # folder since, and the server's answer to that says whether the folder had changed.
            if not _is_newer(header, path):
                _remove(temporary)
                return False
            _copy(descriptor, header, file)
            with suppress(OSError):  # a file system without modes
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            _replace(temporary, path, header)
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
    if not isinstance(minutes, (int, float)) or not 0 < minutes <= _LONGEST_INTERVAL:
        return 0.0
    return 60.0 * minutes


def _replace(temporary: str, path: str, header: BlockHeader) -> None:
    """Rename the complete temporary file. OSError: the file of that path does not have this state, or a newer one."""
    try:
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        if _is_newer(header, path):
            raise
        _remove(temporary)  # there is none if the server has renamed it and its answer was lost


def _remove(name: str) -> None:
    """Remove a temporary file. Another pod may have removed it, or the server's answer was lost."""
    with suppress(FileNotFoundError):
        os.unlink(name)  # noqa: PTH108


def _is_newer(header: BlockHeader, path: str) -> bool:
    return header is not ABSENT and read_file_header(path).version < header.version


def _open_temporary(path: str) -> tuple[FileIO, str, int]:
    """Return an empty temporary file of this process's user, its name, and the mode that the saved file gets.

    All pods try to lock one name, so that one writes and a file that a lost pod left is used again. If that name is
    not a file of ours, or its lock does not come free, this process writes a file of its own.
    """
    name = f"{path}.tmp"
    probe, probe_name = _open_own(path)
    with probe:
        own = os.fstat(probe.fileno())
        _remove(probe_name)  # before the wait, in which this process may be killed
    file = _lock_shared(path, name, own)
    if file is None:
        file, name = _open_own(path)
    return file, name, stat.S_IMODE(own.st_mode)


def _open_own(path: str) -> tuple[FileIO, str]:
    """Create a file with a name that no other user can predict."""
    name = f"{path}.{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    return FileIO(os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666), "r+"), name


def _lock_shared(path: str, name: str, own: os.stat_result) -> FileIO | None:
    """Return the file that all pods share, locked and empty; None if it is unsafe or the lock is not available.

    `own`: the status of a file that this process has just created there. It has the owner that the file system gives
    to our files, which may be another user than ours (NFS with root_squash).
    The renamed or removed file keeps its lock: a pod that waited for it opens the name again.
    """
    stale = 0
    while stale < _STALE_ATTEMPTS:
        try:
            file = FileIO(os.open(name, _FLAGS | os.O_CREAT, _PRIVATE), "r+")
        except OSError:  # a link, a folder, a file of another user
            return None
        try:
            locked = _lock(file) if _is_ours(os.fstat(file.fileno()), own) else False
            if locked is None and os.fstat(file.fileno()).st_size == 0:  # another pod may have a lock, and write
                with suppress(OSError):  # another pod has done it
                    os.unlink(name)  # noqa: PTH108
            if not locked:
                file.close()
                return None
            _look_again(path)
            if _has_name(file, name) and not _has_name(file, path):
                with suppress(OSError):  # a file system without modes
                    os.fchmod(file.fileno(), _PRIVATE)
                file.truncate(0)
                return file
        except OSError as error:
            file.close()
            if error.errno != errno.ESTALE:
                raise
            stale += 1  # another NFS client has renamed or removed the file
        except BaseException:
            file.close()
            raise
        file.close()
    return None


def _look_again(path: str) -> None:
    """Let an NFS client ask the server for the folder's names again: another pod may have renamed the locked file.

    Without it the client may resolve the name for up to 30 s to a file that is the saved state by now.
    """
    probe, name = _open_own(path)
    probe.close()
    _remove(name)


def _is_ours(found: os.stat_result, own: os.stat_result) -> bool:
    """Return whether an open file is a regular one of our user, with no second name by which it is known elsewhere."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == own.st_uid and found.st_nlink <= 1


def _lock(file: FileIO) -> bool | None:
    """Lock the file. Return None if the file system has no locks, False if the file has not grown for LOCK_TIMEOUT.

    OSError, ESTALE: another NFS client has replaced the file.

    A pod that writes holds the lock and the file grows; a process that only keeps the lock would block every save.
    """
    size, deadline = -1, 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return None
        else:
            return True
        now, size_now = time.monotonic(), os.fstat(file.fileno()).st_size
        if size_now != size:
            size, deadline = size_now, now + LOCK_TIMEOUT
        elif now >= deadline:
            return False
        time.sleep(_LOCK_INTERVAL)


def _has_name(file: FileIO, name: str) -> bool:
    """Return whether the open file still is the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(name))
    except FileNotFoundError:
        return False


def _copy(descriptor: int, header: BlockHeader, file: FileIO) -> None:
    """Copy a block. BlockChangedError if its header changed, which a writer changes before the rest."""
    sent = 0
    while sent < header.size and read_header(descriptor) == header:
        sent += os.sendfile(file.fileno(), descriptor, sent, min(_PIECE, header.size - sent))
    if read_header(descriptor) != header:
        raise BlockChangedError("the workers overwrote the training state while it was copied")
