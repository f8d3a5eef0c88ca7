"""Robust mutexes in shared memory, which show early that a process has died.

When a process dies, the kernel releases its robust mutexes first. It frees the memory after that (0.1 s per gigabyte),
and only then closes the files of the process and reports its end. So a released mutex is an early notice of a death.

The owner locks its mutex with its own C library. A process that waits for the mutex reads only the lock word, whose
format is defined by the kernel (futex(2), set_robust_list(2)), so it may use another C library.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from contextlib import suppress
from typing import NamedTuple

from elasticjob._runtime.system.memory_file import fixed_memory_file

_MUTEX_SIZE = 64
"""Bytes of a mutex in the memory: `pthread_mutex_t` has 40 to 48."""
MEMORY_SIZE = 1 << 20
"""Bytes of the memory. Pages that are never used take no memory."""
_SHARED = _ROBUST = 1
"""PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST."""
_WAITERS, _OWNER_DIED, _OWNER = 1 << 31, 1 << 30, (1 << 30) - 1
"""Bits of a lock word: the kernel must wake a waiter; the owner has exited; the thread id of the owner."""
_WORDS = 2
"""The lock word is one of the first two words of a mutex: in glibc the first, in musl the second."""
_FUTEX_WAIT = 0
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the system call."""
_WAIT_AGAIN = (errno.EAGAIN, errno.EINTR)
"""The word had changed before the wait began; or a signal arrived."""
_libc = ctypes.CDLL(None, use_errno=True)


class MutexMemory:
    """Numbered mutexes. All processes that map the same file share them, and so do the processes that they fork."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, MEMORY_SIZE)
        self._all_words = memoryview(self._memory).cast("I")
        self._last = ctypes.c_uint32.from_buffer(self._memory)
        """The number that was reserved last. It is in the shared memory because a child may take over from its parent,
        and must not use the same numbers again."""

    def reserve(self, count: int) -> list[int | None]:
        """Return the numbers of `count` mutexes that no process holds, with None for each that is missing.

        Only one process may call this at a time, and the processes that get the numbers must have called `try_hold`
        before the next call. The number of a process that has ended is used again as late as possible.
        """
        mutexes = MEMORY_SIZE // _MUTEX_SIZE - 1
        found: list[int] = []
        for i in range(mutexes):
            if len(found) == count:
                break
            number = (self._last.value + i) % mutexes + 1
            if not self._is_held(number):
                found.append(number)
                self._memory[number * _MUTEX_SIZE : (number + 1) * _MUTEX_SIZE] = bytes(_MUTEX_SIZE)
        self._last.value = found[-1] if found else self._last.value
        return [*found, *[None] * (count - len(found))]

    def _is_held(self, number: int) -> bool:
        """Return whether a process that called `try_hold` still holds the mutex."""
        first = number * _MUTEX_SIZE // 4
        words = self._all_words[first : first + _WORDS]
        return any(word & _WAITERS and not word & _OWNER_DIED and word & _OWNER for word in words)

    def try_hold(self, number: int) -> None:
        """Lock a mutex until the calling thread, the first of its process, exits or executes a program.

        Do nothing if the C library has no such mutex.
        """
        with suppress(OSError, AttributeError):
            self._hold(number)

    def _hold(self, number: int) -> None:
        attributes = ctypes.create_string_buffer(_MUTEX_SIZE)
        mutex = (ctypes.c_char * _MUTEX_SIZE).from_buffer(self._memory, number * _MUTEX_SIZE)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(mutex, attributes))
        _check(_libc.pthread_mutex_lock(mutex))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))  # the kernel reads it after Python's finalization
        for word in self._words(number):
            if word.value == threading.get_native_id():
                word.value |= _WAITERS  # no other process changes the word while its owner runs

    def wait(self, number: int, pid: int) -> bool:
        """Block until the process `pid` releases a mutex; return False if it is not possible to wait for that.

        When this returns, another process may hold the mutex already.
        """
        futex = _FUTEX.get(os.uname().machine) if sys.maxsize > 1 << 32 else None
        word = next((word for word in self._words(number) if _is_lock_of(word.value, pid)), None)
        if word is None or futex is None:
            return False
        while not (value := word.value) & _OWNER_DIED and value & _OWNER == pid:
            arguments = ctypes.byref(word), _FUTEX_WAIT, ctypes.c_uint32(value), None, None, 0
            failed = _libc.syscall(ctypes.c_long(futex), *arguments)
            if failed and ctypes.get_errno() not in _WAIT_AGAIN:
                return False
        return True

    def _words(self, number: int) -> list[ctypes.c_uint32]:
        return [ctypes.c_uint32.from_buffer(self._memory, number * _MUTEX_SIZE + 4 * i) for i in range(_WORDS)]


class HeldMutex(NamedTuple):
    """A mutex that a process holds for as long as it lives."""

    memory: MutexMemory
    number: int

    def wait(self, pid: int) -> bool:
        """Block until the process `pid` releases it; return False if it is not possible to wait for that."""
        return self.memory.wait(self.number, pid)


def mutex_memory() -> int | None:
    """Return the descriptor of a new file for `MutexMemory`; None if it cannot be created."""
    try:
        return fixed_memory_file("elasticjob-mutexes", MEMORY_SIZE)
    except OSError:
        return None


def open_mutex_memory(descriptor: int | None) -> MutexMemory | None:
    """Map the memory in a file and close the file. Return None if there is no file, or if it cannot be mapped."""
    if descriptor is None:
        return None
    try:
        return MutexMemory(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_lock_of(value: int, pid: int) -> bool:
    """Return whether `value` is the word of a lock that `pid` holds, or whose owner has died.

    It takes the value, because the kernel may change the word between two reads of it.
    """
    return bool(value & _WAITERS) and (bool(value & _OWNER_DIED) or value & _OWNER == pid)


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
