"""Keep what was read for a moment, so that many pages and short intervals do not ask the API server more often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elasticjob.cli.cluster.errors import ClusterError

MOST_VALUES = 512
WAIT_SECONDS = 8.0
"""Seconds that a request waits for another one that reads the same; a page gives up after 10."""

T = TypeVar("T")


class BusyError(ClusterError):
    """The API server has not answered an earlier request yet."""


@dataclass
class _Value:
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float | None = None
    value: Any = None


class RecentValues:
    """Values by key. Several threads may ask: one of them reads, the others get what it has read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.values: dict[object, _Value] = {}
        self._lock = threading.Lock()

    def get(self, key: object, seconds: float, read: Callable[[], T], wait: float = WAIT_SECONDS) -> T:
        """Return what `read` returned for `key` at most so many seconds ago, else call it. An error is not kept.

        BusyError: another thread has been reading it for `wait` seconds.
        """
        with self._lock:
            value = self.values.pop(key, None) or _Value()
            self.values[key] = value  # the newest key is the last one
            while len(self.values) > MOST_VALUES:
                del self.values[next(iter(self.values))]
        if not value.lock.acquire(timeout=wait):
            raise BusyError(f"the API server has not answered for {wait:g} s")
        try:
            if value.read_at is None or self._clock() - value.read_at > seconds:
                value.value = read()
                value.read_at = self._clock()
            found: T = value.value
            return found
        finally:
            value.lock.release()
