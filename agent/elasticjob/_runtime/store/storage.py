"""The data of one store: values, queues, and the clients that wait for keys. No I/O.

A value and a queue of the same key are independent; a key exists if it has a value or a queue that is not empty.

Waiting: `wait` and `barrier` return None if their condition holds already. Otherwise they return a `Waiter`, which the
caller keeps so that it can `cancel` it. The storage calls `Waiter.notify`, once, in the request that creates the last
missing key; the waiter is then over. A value or queue item that is removed before that counts as having existed.

Memory: keys, values, queue items and waiters count against one limit; `account` also counts bytes of others (partly
received requests). A call that would exceed the limit raises WireError, and the client's connection is closed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from elasticjob._runtime.store.wire import WireError

Value: TypeAlias = bytes | bytearray
"""A value. After an APPEND it is a bytearray, so that the next APPEND copies nothing. It reserves an eighth of its size
for further ones, which is not counted."""
_DIGITS = 20
"""Characters of the longest signed 64-bit number."""

# Bytes of memory besides those of keys and values. Measured with tracemalloc on Python 3.11 for 1,000 to 175,000
# entries, at the moment in which a dict grows; rounded up.
VALUE_OVERHEAD = 160
"""A key with a value: two objects and a dict entry. Measured: 156."""
QUEUE_OVERHEAD = 880
"""A key with a queue: a deque has room for 64 items from the start. Measured: 875."""
ITEM_OVERHEAD = 48
"""A queue's item. Measured: 43."""
WAITER_OVERHEAD = 400
"""A pending wait. Measured: 803 with its first key."""
WAITED_KEY_OVERHEAD = 500
"""A key of a pending wait, if no other client waits for it. Measured: 490."""


def _cost(key: bytes, value: Value) -> int:
    return len(key) + len(value) + VALUE_OVERHEAD


def _queue_cost(key: bytes) -> int:
    return len(key) + QUEUE_OVERHEAD


def _item_cost(value: bytes) -> int:
    return len(value) + ITEM_OVERHEAD


class Waiter:
    """A pending WAIT or BARRIER of one client."""

    __slots__ = ("cost", "keys", "notify")

    def __init__(self, keys: Collection[bytes], notify: Callable[[], None]) -> None:
        self.keys = {*keys}
        """Keys that have not existed since the wait began."""
        self.notify = notify
        """Called once, when `keys` has become empty; not called after `cancel`."""
        self.cost = WAITER_OVERHEAD + sum(len(key) + WAITED_KEY_OVERHEAD for key in keys)
        """Bytes that it counts against the memory limit; 0 once it is over."""


class Storage:
    """Keys with the semantics of torch's own server. At most `memory` bytes in all, `largest` bytes in one value."""

    def __init__(self, memory: int, largest: int) -> None:
        self._values: dict[bytes, Value] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self.waiters: dict[bytes, dict[Waiter, None]] = {}
        """By missing key, in the order in which they began to wait."""
        self._memory = memory
        self._largest = largest
        self.used = 0
        """Bytes that count against the memory limit."""

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> Iterable[bytes]:
        """Return the keys that have a value."""
        return self._values.keys()

    def get(self, key: bytes) -> Value:
        """Return the value, empty if the key is missing. The next APPEND may change it in place."""
        return self._values.get(key, b"")

    def set(self, key: bytes, value: bytes) -> None:
        """Set the value; waiters for the key go on."""
        self._put(key, value)
        self._notify_waiters(key)

    def append(self, key: bytes, value: bytes) -> None:
        """Append to the value, empty if the key is missing."""
        current = self._values.get(key)
        if current is None:
            self._put(key, value)
        else:
            self._check_size(len(current) + len(value))
            self.account(len(value))
            if not isinstance(current, bytearray):
                current = self._values[key] = bytearray(current)
            current += value
        self._notify_waiters(key)

    def add(self, key: bytes, number: int) -> int:
        """Add to the decimal number in the value, 0 if the key is missing; return the sum."""
        total = self._count(key) + number
        if not -(2**63) <= total < 2**63:
            raise WireError("not-a-number", f"the sum in key {key[:80]!r} does not fit into 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Value:
        """Set `desired` if the value is `expected`, or if the key is missing and `expected` is empty.

        Returns the value that the key has afterwards; if the key stays missing, `expected`.
        """
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current is None or current == expected:
            self.set(key, desired)
            return desired
        return current

    def delete(self, key: bytes) -> int:
        """Delete the value; return the number of deleted keys, 0 or 1."""
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self.account(-_cost(key, value))
        return 1

    def check(self, keys: Iterable[bytes]) -> bool:
        """Return whether all keys exist."""
        return all(k in self._values or self._queues.get(k) for k in keys)

    def wait(self, keys: Collection[bytes], notify: Callable[[], None]) -> Waiter | None:
        """Return a waiter for the missing keys, None if all exist."""
        if all(map(self._values.__contains__, keys)):
            return None
        missing = {k for k in keys if k not in self._values and not self._queues.get(k)}
        return self._wait(missing, notify) if missing else None

    def _wait(self, keys: Collection[bytes], notify: Callable[[], None]) -> Waiter:
        waiter = Waiter(keys, notify)
        self.account(waiter.cost)
        for key in keys:
            self.waiters.setdefault(key, {})[waiter] = None
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """Forget a waiter; it is not notified any more."""
        for key in waiter.keys:
            waiting = self.waiters.get(key, {})
            waiting.pop(waiter, None)
            if not waiting:
                self.waiters.pop(key, None)
        waiter.keys.clear()
        self._release(waiter)

    def _release(self, waiter: Waiter) -> None:
        self.account(-waiter.cost)
        waiter.cost = 0

    def barrier(self, key: bytes, size: int, notify: Callable[[], None]) -> Waiter | None:
        """Count the caller in; return None if it completes the barrier, which notifies the others, else a waiter."""
        arrived = self._count(key) + 1
        self._put(key, b"%d" % arrived)
        if arrived >= size:
            self._notify_waiters(key)
            return None
        return self._wait({key}, notify)

    def push(self, key: bytes, value: bytes) -> None:
        """Append to a queue; one waiter for the key goes on."""
        queue = self._queues.get(key)
        self.account(_item_cost(value) + (_queue_cost(key) if queue is None else 0))
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(value)
        self._notify_waiters(key, one=True)

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """Remove a queue's first value; return the length before and the value, (0, b"") for an empty queue."""
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        self.account(-_item_cost(value))
        if not queue:
            del self._queues[key]
            self.account(-_queue_cost(key))
        return length, value

    def length(self, key: bytes) -> int:
        """Return the length of a queue, 0 if there is none."""
        return len(self._queues.get(key, ()))

    def _count(self, key: bytes) -> int:
        value = self._values.get(key, b"0")
        if len(value) <= _DIGITS:
            with contextlib.suppress(ValueError):
                return int(value)
        raise WireError("not-a-number", f"the value of key {key[:80]!r} is not a number")

    def _put(self, key: bytes, value: bytes) -> None:
        self._check_size(len(value))
        old = self._values.get(key)
        self.account(len(value) - len(old) if old is not None else _cost(key, value))
        self._values[key] = value

    def _check_size(self, size: int) -> None:
        if size > self._largest:
            raise WireError("value-too-long", f"a value has {size} bytes; {self._largest} bytes are allowed")

    def account(self, size: int) -> None:
        """Count `size` more bytes, fewer if negative. WireError: the sum would exceed the memory limit."""
        if size > 0 and self.used + size > self._memory:
            raise WireError(
                "out-of-memory", f"the store holds {self.used} bytes, and {self._memory} bytes are allowed in all"
            )
        self.used += size

    def _notify_waiters(self, key: bytes, *, one: bool = False) -> None:
        """Remove a key from its waiters, and notify those without missing keys; with `one`, just the first."""
        waiting = self.waiters.pop(key, None)
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
            # A queue item serves one waiter; the others wait for the next item.
            self.waiters[key] = waiting
