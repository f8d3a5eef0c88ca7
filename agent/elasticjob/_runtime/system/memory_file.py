"""Files in memory that agents and workers share by their descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
from contextlib import suppress

SHARED_MEMORY = "/dev/shm"  # noqa: S108
_CLOSE_ON_EXEC, _ALLOW_SEALING = 1, 2
"""MFD_CLOEXEC and MFD_ALLOW_SEALING of Linux; a Python without `os.memfd_create` lacks their names too."""
_ADD_SEALS, _GET_SEALS = 1033, 1034
"""F_ADD_SEALS and F_GET_SEALS of Linux (fcntl(2))."""
_SIZE_SEALS = 1 | 2 | 4
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW."""


def memory_file(name: str) -> int:
    """Return the descriptor of a new, empty file in memory. The file ends with its last descriptor.

    Child programs do not inherit the descriptor. OSError: neither the kernel nor /dev/shm can create the file.
    """
    return _create(name, _CLOSE_ON_EXEC)


def fixed_memory_file(name: str, size: int) -> int:
    """Return the descriptor of a new file in memory with `size` bytes. No process can change the size, if possible.

    A process that reads mapped memory beyond the end of its file is killed (SIGBUS), so a program that cuts off the
    file would kill all others. See `has_fixed_size`. OSError: as `memory_file`.
    """
    descriptor = _create(name, _CLOSE_ON_EXEC | _ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    with suppress(OSError):  # a file in /dev/shm has no seals
        fcntl.fcntl(descriptor, _ADD_SEALS, _SIZE_SEALS)
    return descriptor


def has_fixed_size(descriptor: int) -> bool:
    """Return whether no process can change the size of this file."""
    with suppress(OSError):
        return fcntl.fcntl(descriptor, _GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    return False


def _create(name: str, flags: int) -> int:
    try:
        return _anonymous_file(name, flags)
    except (AttributeError, OSError):  # not in this C library, or the kernel or its sandbox refuses the call
        return _unlinked_file(name)


def _anonymous_file(name: str, flags: int) -> int:
    # A Python that was built for an old C library lacks it: older conda and standalone builds.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    descriptor: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), flags)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return descriptor


def _unlinked_file(name: str) -> int:
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=SHARED_MEMORY)
    os.unlink(path)  # noqa: PTH108
    return descriptor
