"""The keys of one store: values, queues, and who waits for what. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from elasticjob.store.wire import WireError


class Waiter:
    """One connection's WAIT: told once, when its last missing key exists."""

    __slots__ = ("keys", "tell")

    def __init__(self, keys: Iterable[bytes], tell: Callable[[], None]) -> None:
        self.keys = {*keys}
        self.tell = tell


class Storage:
    """Semantics are those of torch's own server, key by key. Sizes are counted against `memory` bytes."""

    def __init__(self, memory: int) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiters: dict[bytes, list[Waiter]] = {}
        self._memory = memory
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
        self.set(key, str(total).encode())
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
        self.used -= len(key) + len(value)
        return 1

    def check(self, keys: Iterable[bytes]) -> bool:
        return all(k in self._values or self._queues.get(k) for k in keys)

    def wait(self, keys: Iterable[bytes], tell: Callable[[], None]) -> Waiter | None:
        """A waiter for the keys that are missing; None when none is."""
        missing = {k for k in keys if k not in self._values and not self._queues.get(k)}
        return self._wait(missing, tell) if missing else None

    def _wait(self, keys: Iterable[bytes], tell: Callable[[], None]) -> Waiter:
        waiter = Waiter(keys, tell)
        for key in waiter.keys:
            self._waiters.setdefault(key, []).append(waiter)
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """The wait is over, whatever it waited for."""
        for key in waiter.keys:
            waiting = self._waiters.get(key, [])
            if waiter in waiting:
                waiting.remove(waiter)
            if not waiting:
                self._waiters.pop(key, None)
        waiter.keys.clear()

    def barrier(self, key: bytes, size: int, tell: Callable[[], None]) -> Waiter | None:
        """Counts this caller in; None when it completes the barrier, which tells the others."""
        arrived = self._count(key) + 1
        self._put(key, str(arrived).encode())
        if arrived >= size:
            self._exists(key)
            return None
        return self._wait({key}, tell)

    def push(self, key: bytes, value: bytes) -> None:
        self._take(len(value))
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
        self.used -= len(value)
        return length, value

    def length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    def _count(self, key: bytes) -> int:
        held = self._values.get(key)
        try:
            return int(held) if held is not None else 0
        except ValueError:
            raise WireError("not-a-number", f"{key[:80]!r} does not hold a number") from None

    def _put(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        self._take(len(value) - len(old) if old is not None else len(key) + len(value))
        self._values[key] = value

    def _take(self, size: int) -> None:
        if size > 0 and self.used + size > self._memory:
            raise WireError("out-of-memory", f"the store holds {self.used} bytes; {self._memory} are allowed")
        self.used += size

    def _exists(self, key: bytes, *, one: bool = False) -> None:
        waiting = self._waiters.pop(key, None)
        if waiting is None:
            return
        for i, waiter in enumerate(waiting):
            waiter.keys.discard(key)
            if not waiter.keys:
                waiter.tell()
                if one:
                    # A queue's value serves one waiter; the others wait on.
                    self._keep_waiting(key, waiting[i + 1 :])
                    return

    def _keep_waiting(self, key: bytes, waiters: list[Waiter]) -> None:
        if waiters:
            self._waiters[key] = waiters
