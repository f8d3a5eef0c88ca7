"""Torch's own TCPStore client against our server, every operation; and process groups that meet on it."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from elasticjob.store.server import StoreServer

pytestmark = pytest.mark.torch
dist: Any = pytest.importorskip("torch.distributed")


class Served:
    """Our server in a loop of its own thread, as torch's client blocks its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = StoreServer()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self.server.start("127.0.0.1"), self.loop).result(5)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


# Torch's client fails after some dozens of stores in one process: one for all tests.
@pytest.fixture(scope="module")
def store(served: Served) -> Any:
    return dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=5))


def test_set_and_get(store: Any) -> None:
    store.set("a", "one")
    assert store.get("a") == b"one"
    store.set("big", "x" * 3_000_000)
    assert len(store.get("big")) == 3_000_000


def test_add_counts(store: Any) -> None:
    assert [store.add("n", 2), store.add("n", -5)] == [2, -3]
    assert store.get("n") == b"-3"


def test_compare_set(store: Any) -> None:
    assert store.compare_set("cs", "nothing", "x") == b"nothing"
    assert store.compare_set("cs", "", "first") == b"first"
    assert store.compare_set("cs", "wrong", "second") == b"first"
    assert store.compare_set("cs", "first", "second") == b"second"


def test_check_and_delete(store: Any) -> None:
    store.set("here", "")
    assert store.check(["here"])
    assert not store.check(["here", "not here"])
    assert store.delete_key("here")
    assert not store.delete_key("here")


def test_wait_ends_when_the_key_comes(served: Served, store: Any) -> None:
    def bring() -> None:
        served.server.storage.set(b"/late", b"1")

    served.loop.call_soon_threadsafe(served.loop.call_later, 0.05, bring)
    store.wait(["late"], timedelta(seconds=5))


def test_wait_times_out_and_the_connection_lives_on(store: Any) -> None:
    with pytest.raises(dist.DistStoreError, match="(?i)timeout"):
        store.wait(["never"], timedelta(milliseconds=50))
    store.set("after", "1")
    assert store.get("after") == b"1"


def test_append_and_many(store: Any) -> None:
    store.append("log", "a")
    store.append("log", "b")
    store.multi_set(["m1", "m2"], ["1", "2"])
    assert store.multi_get(["log", "m1", "m2"]) == [b"ab", b"1", b"2"]


def test_number_of_keys(store: Any) -> None:
    before = store.num_keys()
    store.set("one more", "")
    assert store.num_keys() == before + 1


def test_queues(store: Any) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q")] == [b"1", b"2"]
    assert store.queue_len("q") == 0


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch has no list_keys")
def test_list_keys(store: Any) -> None:
    store.set("listed", "")
    assert "listed" in store.list_keys()


@pytest.mark.skipif(not hasattr(dist.TCPStore, "barrier"), reason="this torch has no barrier")
def test_barrier(served: Served, store: Any) -> None:
    other = dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=5))
    thread = threading.Thread(target=other.barrier, args=("gate", 2, timedelta(seconds=5)))
    thread.start()
    store.barrier("gate", 2, timedelta(seconds=5))
    thread.join(5)
    assert not thread.is_alive()


def test_prefixes(store: Any) -> None:
    inner = dist.PrefixStore("p", store)
    inner.set("k", "v")
    assert store.get("p/k") == b"v"


def _all_reduce(rank: int, port: int, results: Any) -> None:
    import torch

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tensor = torch.ones(1) * (rank + 1)
    dist.all_reduce(tensor)
    results.put(float(tensor))
    dist.destroy_process_group()


def test_a_process_group_meets_on_it(served: Served) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_all_reduce, args=(rank, served.port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert [results.get(timeout=60) for _ in ranks] == [3.0, 3.0]
    for rank in ranks:
        rank.join(20)
        assert rank.exitcode == 0
