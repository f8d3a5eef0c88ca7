"""Every operation of our client against torch's own servers, with libuv and without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.common.store_client import StoreClient

pytestmark = pytest.mark.torch
dist: Any = pytest.importorskip("torch.distributed")


@pytest.fixture(scope="module", params=[True, False], ids=["libuv", "threads"])
def master(request: pytest.FixtureRequest) -> Any:
    try:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        pytest.skip("this torch is built without libuv")


@pytest.fixture
def port(master: Any) -> int:
    return int(master.port)


async def test_every_operation(port: int) -> None:
    store = await StoreClient.connect("127.0.0.1", port)
    await store.set("a", b"one")
    assert await store.get("a") == b"one"
    assert await store.add("n", 2) == 2
    assert await store.add("n", -5) == -3
    assert await store.compare_set("c", b"", b"first") == b"first"
    assert await store.compare_set("c", b"wrong", b"second") == b"first"
    await store.append("a", b" two")
    assert await store.get("a") == b"one two"
    assert await store.check(["a", "n"])
    assert not await store.check(["nothing"])
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.num_keys() >= 2
    await store.multi_set({"m1": b"1", "m2": b"2"})
    assert await store.multi_get(["m1", "m2"]) == [b"1", b"2"]
    store.close()


async def test_queues_keys_and_barriers(master: Any) -> None:
    if not master.libuvBackend or not hasattr(master, "barrier"):
        pytest.skip("this torch, or its server without libuv, does not have them")
    store = await StoreClient.connect("127.0.0.1", master.port)
    other = await StoreClient.connect("127.0.0.1", master.port)
    await store.queue_push("q", b"1")
    await other.wait(["q"], timeout=5)
    assert await store.queue_len("q") == 1
    assert [await store.queue_pop("q"), await store.queue_pop("q")] == [b"1", None]
    await store.set("listed", b"")
    assert "listed" in await store.list_keys()
    await asyncio.gather(store.barrier("b", 2, timeout=5), other.barrier("b", 2, timeout=5))
    with pytest.raises(TimeoutError, match="2 clients"):
        await store.barrier("alone", 2, timeout=0.05)
    assert await store.num_keys() > 0
    store.close()
    other.close()


async def test_a_cancelled_wait_leaves_the_connection_usable(port: int) -> None:
    store = await StoreClient.connect("127.0.0.1", port)
    with pytest.raises(TimeoutError, match="never"):
        await store.wait(["never"], timeout=0.05)
    await store.set("after", b"1")
    assert await store.get("after", timeout=5) == b"1"
    store.close()
