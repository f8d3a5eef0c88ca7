"""Our client against torch's own servers, the libuv one and the older one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from elasticjob.store.client import StoreClient

pytestmark = pytest.mark.torch
dist: Any = pytest.importorskip("torch.distributed")


@pytest.fixture(scope="module", params=[True, False], ids=["libuv", "threads"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5), use_libuv=request.param
    )
    yield server.port


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
    store.close()


async def test_a_wait_that_is_given_up_leaves_the_connection_usable(port: int) -> None:
    store = await StoreClient.connect("127.0.0.1", port)
    with pytest.raises(TimeoutError, match="never"):
        await store.wait(["never"], timeout=0.05)
    await store.set("after", b"1")
    assert await store.get("after", timeout=5) == b"1"
    store.close()
