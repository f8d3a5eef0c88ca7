"""A store in memory, with the operations of a `torch.distributed.Store` that the in-process wrapper needs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from elasticjob.inprocess._stores.store_mixin import StoreMixin


class DictStore(StoreMixin):
    """A store whose clients are threads of this process. `calls` has the operations and their keys, in order."""

    def __init__(self, data: dict[str, bytes] | None = None, prefix: str = "") -> None:
        self.data = {} if data is None else data
        self.calls: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._prefix = prefix

    def with_prefix(self, prefix: str) -> DictStore:
        other = DictStore(self.data, f"{self._prefix}{prefix}/")
        other.calls, other._changed = self.calls, self._changed
        return other

    def set(self, key: str, value: str) -> None:
        self._write("set", key, value.encode())

    def append(self, key: str, value: str) -> None:
        with self._changed:
            self._write("append", key, self.data.get(self._prefix + key, b"") + value.encode())

    def add(self, key: str, number: int) -> int:
        with self._changed:
            total = int(self.data.get(self._prefix + key, b"0")) + number
            self._write("add", key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._changed:
            if self.data.get(self._prefix + key, b"").decode() == expected:
                self._write("compare_set", key, desired.encode())
            return self.data[self._prefix + key]

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=10))
        return self.data[self._prefix + key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self.data for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self.calls += [("wait", self._prefix + key) for key in keys]
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise TimeoutError(f"{keys} do not exist")

    def _write(self, operation: str, key: str, value: bytes) -> None:
        with self._changed:
            self.calls.append((operation, self._prefix + key))
            self.data[self._prefix + key] = value
            self._changed.notify_all()
