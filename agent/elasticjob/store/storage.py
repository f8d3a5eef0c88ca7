"""The keys of one store: values, queues, and who waits for what. No I/O."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable

from elasticjob.store.wire import WireError

_DIGITS = 20
"""No signed 64-bit number is longer."""
_OVERHEAD = 128
"""Bytes that a key costs besides its own and its value's."""


def _cost(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + _OVERHEAD


class Waiter:
    """One connection's WAIT: told once, when its last missing key exists."""

    __slots__ = ("cost", "keys", "notify")

    def __init__(self, keys: Collection[bytes], tell: Callable[[], None]) -> None:
        self.keys = {*keys}
        self.notify = tell
        self.cost = sum(_cost(key, b"") for key in keys)
        """Bytes of the store's memory, until told or forgotten."""


class Storage:
    """Semantics are those of torch's own server, key by key. At most `memory` bytes in all, `largest` in one value."""

    def __init__(self, memory: int, largest: int) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiters: dict[bytes, dict[Waiter, None]] = {}
        """In the order in which they came."""
        self._memory = memory
        self._largest = largest
        self.used = 0

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> Iterable[bytes]:
        return self._values.keys()

    def get(self, key: bytes) -> bytes:
        """The value, empty for a missing key."""
        return self._values.get(key, b"")

    def set(self, key: bytes, value: bytes) -> None:
        self._put(key, value)
        self._exists(key)

    def append(self, key: bytes, value: bytes) -> None:
        self.set(key, self.get(key) + value)

    def add(self, key: bytes, number: int) -> int:
        total = self._count(key) + number
        if not -(2**63) <= total < 2**63:
            raise WireError("not-a-number", f"{key[:80]!r} would leave 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """The value afterwards; for a missing key that was expected to have a value, what was expected."""
        held = self._values.get(key)
        if held is None and expected:
            return expected
        if held is None or held == expected:
            self.set(key, desired)
            return desired
        return held

    def delete(self, key: bytes) -> int:
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self.account(-_cost(key, value))
        return 1

    def check(self, keys: Iterable[bytes]) -> bool:
        return all(k in self._values or self._queues.get(k) for k in keys)

    def wait(self, keys: Iterable[bytes], tell: Callable[[], None]) -> Waiter | None:
        """A waiter for the keys that are missing; None when none is."""
        missing = {k for k in keys if k not in self._values and not self._queues.get(k)}
        return self._wait(missing, tell) if missing else None

    def _wait(self, keys: Collection[bytes], tell: Callable[[], None]) -> Waiter:
        waiter = Waiter(keys, tell)
        self.account(waiter.cost)
        for key in keys:
            self._waiters.setdefault(key, {})[waiter] = None
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """The wait is over, whatever it waited for."""
        for key in waiter.keys:
            waiting = self._waiters.get(key, {})
            waiting.pop(waiter, None)
            if not waiting:
                self._waiters.pop(key, None)
        waiter.keys.clear()
        self._release(waiter)

    def _release(self, waiter: Waiter) -> None:
        self.account(-waiter.cost)
        waiter.cost = 0

    def barrier(self, key: bytes, size: int, tell: Callable[[], None]) -> Waiter | None:
        """Counts this caller in; None when it completes the barrier, which tells the others."""
        arrived = self._count(key) + 1
        self._put(key, b"%d" % arrived)
        if arrived >= size:
            self._exists(key)
            return None
        return self._wait({key}, tell)

    def push(self, key: bytes, value: bytes) -> None:
        self.account(_cost(key, value))
        self._queues.setdefault(key, deque()).append(value)
        self._exists(key, one=True)

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """(length before, first value); (0, b"") for an empty queue."""
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        if not queue:
            del self._queues[key]
        self.account(-_cost(key, value))
        return length, value

    def length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    def _count(self, key: bytes) -> int:
        held = self._values.get(key, b"0")
        if len(held) <= _DIGITS:
            with contextlib.suppress(ValueError):
                return int(held)
        raise WireError("not-a-number", f"{key[:80]!r} does not hold a number")

    def _put(self, key: bytes, value: bytes) -> None:
        if len(value) > self._largest:
            raise WireError("value-too-long", f"a value of {len(value)} bytes; {self._largest} are allowed")
        old = self._values.get(key)
        self.account(len(value) - len(old) if old is not None else _cost(key, value))
        self._values[key] = value

    def account(self, size: int) -> None:
        """Count bytes that are held from now on (negative: no longer). WireError when they would be too many."""
        if size > 0 and self.used + size > self._memory:
            raise WireError("out-of-memory", f"the store holds {self.used} bytes; {self._memory} are allowed")
        self.used += size

    def _exists(self, key: bytes, *, one: bool = False) -> None:
        waiting = self._waiters.pop(key, None)
        if waiting is None:
            return
        for waiter in tuple(waiting):
            waiter.keys.discard(key)
            del waiting[waiter]
            if not waiter.keys:
                self._release(waiter)
                waiter.notify()
                if one:
                    break
        if waiting:
            # A queue's value serves one waiter; the others wait on.
            self._waiters[key] = waiting
