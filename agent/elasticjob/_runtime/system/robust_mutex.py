"""Robust mutexes in shared memory: the kernel releases that of a process which exits before it frees its memory.

It closes the files of the process, and reports its end, only after that, 0.1 s a gigabyte later. The owner locks its
mutex by its own C library. A process that waits needs only the lock word, whose format is the kernel's (futex(2),
set_robust_list(2)): its C library may be another one.
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
_SIZE = 1 << 20
"""Bytes of the memory. Pages that are never used take no memory."""
_SHARED = _ROBUST = 1
"""PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST."""
_WAITERS, _OWNER_DIED, _OWNER = 1 << 31, 1 << 30, (1 << 30) - 1
"""Bits of a lock word: whether the kernel wakes a waiter, whether the owner has exited, and the owner's thread id."""
_WORDS = 2
"""Words at the start of a mutex of which one is the lock word: glibc's first, musl's second."""
_FUTEX_WAIT = 0
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the system call."""
_WAIT_AGAIN = (errno.EAGAIN, errno.EINTR)
"""The word had changed before the wait began; a signal came."""
_libc = ctypes.CDLL(None, use_errno=True)


class MutexMemory:
    """Numbered mutexes. Processes that map the same file have the same mutexes, and so have those that they fork."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._all_words = memoryview(self._memory).cast("I")
        self._last = ctypes.c_uint32.from_buffer(self._memory)
        """In the memory itself: a child that goes on to fork in the place of its parent does not know the parent's."""

    def reserve(self, count: int) -> list[int | None]:
        """Return the numbers of `count` mutexes that no process holds; None in place of those that are missing.

        Only one process may call this at a time, and the processes that get the numbers must have called `try_hold`
        before the next call. A number is used again once its process has ended, as late as possible.
        """
        mutexes = _SIZE // _MUTEX_SIZE - 1
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
        """Return whether a process holds a mutex since `try_hold`."""
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
        """Block until the process `pid` releases a mutex; return False if that cannot be awaited.

        Another process may hold it by then.
        """
        futex = _FUTEX.get(os.uname().machine) if sys.maxsize > 1 << 32 else None
        locked = (
            w for w in self._words(number) if w.value & _WAITERS and (w.value & _OWNER_DIED or w.value & _OWNER == pid)
        )
        word = next(locked, None)
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
        """Block until the process `pid` releases it; return False if that cannot be awaited."""
        return self.memory.wait(self.number, pid)


def mutex_memory() -> int | None:
    """Return the descriptor of a new file for `MutexMemory`; None if there can be none."""
    try:
        return fixed_memory_file("elasticjob-mutexes", _SIZE)
    except OSError:
        return None


def open_mutex_memory(descriptor: int | None) -> MutexMemory | None:
    """Map the memory in a file, which this closes; None if there is no file, or no room for it."""
    if descriptor is None:
        return None
    try:
        return MutexMemory(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
