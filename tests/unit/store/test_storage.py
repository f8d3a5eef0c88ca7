"""What the store counts against its memory limit is what it uses, and a value is the same however it was made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from elasticjob._runtime.store.storage import Storage
from elasticjob._runtime.store.wire import WireError

COUNTS = [1000, 5461, 5462, 30_000]
"""Numbers of entries. A dict grows with the 5462nd."""
MIB = 1024 * 1024


def key(number: int) -> bytes:
    return b"/%015d" % number


def value(number: int) -> bytes:
    return b"v%015d" % number


def set_values(storage: Storage, count: int) -> None:
    for number in range(count):
        storage.set(key(number), value(number))


def append_values(storage: Storage, count: int) -> None:
    for number in range(count // 10):
        storage.set(key(number), b"")
        for _ in range(10):
            storage.append(key(number), value(number) * 5)


def push_queues(storage: Storage, count: int) -> None:
    for number in range(count):
        storage.push(key(number), value(number))


def push_items(storage: Storage, count: int) -> None:
    for number in range(count):
        storage.push(b"queue", value(number))


def wait_for_each(storage: Storage, count: int) -> None:
    for number in range(count):
        storage.wait([key(number)], lambda: None)


def wait_for_one(storage: Storage, count: int) -> None:
    for _ in range(count):
        storage.wait([b"".join((b"/on", b"e"))], lambda: None)


def wait_for_all(storage: Storage, count: int) -> None:
    storage.wait([key(number) for number in range(count)], lambda: None)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "fill", [set_values, append_values, push_queues, push_items, wait_for_each, wait_for_one, wait_for_all]
)
def test_the_memory_that_is_used_is_counted(fill: Callable[[Storage, int], None], count: int) -> None:
    storage = Storage(memory=1024 * MIB, largest=MIB)
    tracemalloc.start()
    try:
        fill(storage, count)
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= storage.used * 1.02 + 2000
    assert used >= storage.used * 0.4, "twice what is used must fit into the limit"


def test_what_is_removed_is_counted_no_more() -> None:
    storage = Storage(memory=MIB, largest=MIB)
    storage.set(b"a", b"1")
    storage.append(b"a", b"2")
    storage.append(b"b", b"3")
    for item in (b"x", b"yy"):
        storage.push(b"q", item)
    waiter = storage.wait([b"c", b"d"], lambda: None)
    assert storage.delete(b"a") == storage.delete(b"b") == 1
    assert [storage.pop(b"q")[1] for _ in range(2)] == [b"x", b"yy"]
    assert waiter is not None
    storage.cancel(waiter)
    assert storage.used == 0


def test_queues_beyond_the_limit_are_refused() -> None:
    storage = Storage(memory=100_000, largest=MIB)
    with pytest.raises(WireError, match="100000 bytes are allowed"):
        push_queues(storage, 1000)
    assert storage.used <= 100_000


def test_an_append_beyond_a_limit_leaves_the_value_as_it_was() -> None:
    storage = Storage(memory=1000, largest=500)
    storage.set(b"a", b"x" * 300)
    storage.set(b"b", b"x" * 300)
    for name, size, reason in ((b"a", 201, "value-too-long"), (b"b", 150, "out-of-memory")):
        used = storage.used
        with pytest.raises(WireError) as refused:
            storage.append(name, b"y" * size)
        assert refused.value.reason == reason
        assert (storage.get(name), storage.used) == (b"x" * 300, used)


def test_an_appended_value_is_like_any_other() -> None:
    storage = Storage(memory=MIB, largest=MIB)
    storage.set(b"n", b"1")
    storage.append(b"n", b"2")
    assert storage.add(b"n", 3) == 15
    storage.append(b"n", b"0")
    assert storage.compare_set(b"n", b"150", b"7") == b"7"
    assert storage.get(b"n") == b"7"
    notified = []
    storage.wait([b"late"], lambda: notified.append(True))
    storage.append(b"late", b"")
    assert notified
