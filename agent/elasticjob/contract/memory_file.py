"""Files in memory that agents and workers share by their descriptors."""

from __future__ import annotations

import ctypes
import os
import tempfile

SHARED_MEMORY = "/dev/shm"  # noqa: S108
_CLOSE_ON_EXEC = 1
"""MFD_CLOEXEC of Linux; a Python without `os.memfd_create` lacks `os.MFD_CLOEXEC` too."""


def memory_file(name: str) -> int:
    """Return the descriptor of a new, empty file in memory. The file ends with its last descriptor.

    Child programs do not inherit the descriptor. OSError: neither the kernel nor /dev/shm can create the file.
    """
    try:
        return _anonymous_file(name)
    except (AttributeError, OSError):  # not in this C library, or the kernel or its sandbox refuses the call
        return _unlinked_file(name)


def _anonymous_file(name: str) -> int:
    # A Python that was built for an old C library lacks it: older conda and standalone builds.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    descriptor: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _CLOSE_ON_EXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return descriptor


def _unlinked_file(name: str) -> int:
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=SHARED_MEMORY)
    os.unlink(path)  # noqa: PTH108
    return descriptor
