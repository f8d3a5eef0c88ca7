"""Every operation of torch's own TCPStore client against our server, and process groups that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import elasticjob

pytestmark = pytest.mark.torch
dist: Any = pytest.importorskip("torch.distributed")


def _has_libuv() -> bool:
    """Return whether torch is built with libuv. Debian's is not, and its client then refuses `use_libuv=True`."""
    try:
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError:
        return False
    return True


LIBUV = _has_libuv()

SERVER = """
import asyncio
from elasticjob._runtime.store.server import StoreServer

async def main():
    print(await StoreServer().start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def serving() -> Iterator[int]:
    """Run our server in a process of its own, because some of torch's calls hold the GIL while they wait."""
    agent = Path(elasticjob.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(agent)}
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module", params=[True, False] if LIBUV else [False], ids=lambda uv: "libuv" if uv else "plain")
def libuv(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def port(libuv: bool) -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture(scope="module")
def other(port: int, libuv: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), use_libuv=libuv)


# One store for all tests: torch's client fails after some dozens of stores in one process.
@pytest.fixture(scope="module")
def store(port: int, libuv: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), use_libuv=libuv)


TESTED = {
    "add", "append", "barrier", "check", "clone", "compare_set", "delete_key", "get", "has_extended_api", "list_keys",
    "multi_get", "multi_set", "num_keys", "queue_len", "queue_pop", "queue_push", "set", "set_timeout", "wait",
}  # fmt: skip
PROPERTIES = {"collect_client_counters", "host", "libuvBackend", "port", "timeout", "_pybind11_conduit_v1_"}


def test_no_operation_of_this_torch_is_left_untested() -> None:
    """Fails if a newer torch has an operation that our server may not know yet."""
    offered = {name for name in dir(dist.TCPStore) if not name.startswith("__")}
    assert offered <= TESTED | PROPERTIES


def test_set_and_get(store: Any) -> None:
    store.set("a", "one")
    assert store.get("a") == b"one"
    store.set("big", "x" * 3_000_000)
    assert len(store.get("big")) == 3_000_000


def test_get_waits_for_its_key(store: Any, other: Any) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "not yet")
        other.set("not yet", "now")
        assert waiting.result(20) == b"now"


@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="this torch has no clone")
def test_a_clone_is_a_connection_of_its_own(store: Any) -> None:
    clone = store.clone()
    clone.set("cloned", "1")
    assert store.get("cloned") == b"1"


def test_it_has_the_extended_api(store: Any) -> None:
    store.set_timeout(timedelta(seconds=6))
    assert not hasattr(store, "has_extended_api") or store.has_extended_api()


def test_add_counts(store: Any) -> None:
    assert [store.add("n", 2), store.add("n", -5)] == [2, -3]
    assert store.get("n") == b"-3"


def test_compare_set(store: Any) -> None:
    assert store.compare_set("cs", "nothing", "x") == b"nothing"
    assert store.compare_set("cs", "", "first") == b"first"
    assert store.compare_set("cs", "wrong", "second") == b"first"
    assert store.compare_set("cs", "first", "second") == b"second"


@pytest.mark.skipif(not hasattr(dist.TCPStore, "check"), reason="this torch has no check")
def test_check_and_delete(store: Any) -> None:
    store.set("here", "")
    assert store.check(["here"])
    assert not store.check(["here", "not here"])
    assert store.delete_key("here")
    assert not store.delete_key("here")


def test_wait_ends_when_the_key_comes(store: Any, other: Any) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.wait, ["late", "later"], timedelta(seconds=20))
        other.set("late", "1")
        assert not waiting.done()
        other.set("later", "1")
        waiting.result(20)


def test_a_wait_that_times_out_leaves_the_connection_usable(store: Any) -> None:
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
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


@pytest.mark.skipif(not hasattr(dist.TCPStore, "queue_push"), reason="this torch has no queues")
def test_queues(store: Any, other: Any) -> None:
    if not store.libuvBackend:
        with pytest.raises(RuntimeError, match="not implemented on legacy"):  # torch's own client refuses
            store.queue_push("q", "1")
        return
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.check(["q"])
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q")] == [b"1", b"2"]
    assert store.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.queue_pop, "q")
        other.queue_push("q", "3")
        assert waiting.result(20) == b"3"


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch has no list_keys")
def test_list_keys(store: Any) -> None:
    store.set("listed", "")
    assert "listed" in store.list_keys()


@pytest.mark.skipif(not hasattr(dist.TCPStore, "barrier"), reason="this torch has no barrier")
def test_barrier(store: Any, other: Any) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.barrier, "gate", 2, timedelta(seconds=20))
        store.barrier("gate", 2, timedelta(seconds=20))
        waiting.result(20)
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        store.barrier("alone", 2, timedelta(milliseconds=50))


def test_prefixes(store: Any) -> None:
    inner = dist.PrefixStore("p", store)
    inner.set("k", "v")
    assert store.get("p/k") == b"v"


ALL_REDUCE = """
import sys, torch, torch.distributed as dist
rank, port, libuv = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False, use_libuv=bool(libuv))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tensor = torch.ones(1) * (rank + 1)
dist.all_reduce(tensor)
print(float(tensor))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_process_group_initializes_on_it(libuv: bool) -> None:
    with serving() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", ALL_REDUCE, str(rank), str(port), str(int(libuv))], stdout=subprocess.PIPE
            )
            for rank in range(2)
        ]
        # Some versions of gloo print a line of their own first.
        assert [rank.communicate(timeout=90)[0].split()[-1] for rank in ranks] == [b"3.0", b"3.0"]
        assert [rank.returncode for rank in ranks] == [0, 0]
