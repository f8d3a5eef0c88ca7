"""Our server gives the same answers as torch's server, byte by byte, to random requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob._runtime.store import wire
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import Op

pytestmark = pytest.mark.torch
dist: Any = pytest.importorskip("torch.distributed")

HELLO = wire.request(Op.VALIDATE, number=wire.MAGIC)
KEY = st.sampled_from([b"/a", b"/b", b"/c"])
QUEUE = st.sampled_from([b"/p", b"/q"])
# Numbers only: torch's server closes the connection on an ADD to anything else, as ours does.
VALUE = st.sampled_from([b"0", b"1", b"-7", b"12"])
REQUESTS = {
    "plain": st.one_of(
        st.builds(lambda k, v: wire.request(Op.SET, [k], [v]), KEY, VALUE),
        st.builds(lambda k, v: wire.request(Op.APPEND, [k], [v]), st.just(b"/log"), VALUE),
        st.builds(lambda k, a, b: wire.request(Op.COMPARE_SET, [k], [a, b]), KEY, st.just(b"") | VALUE, VALUE),
        st.builds(lambda k, n: wire.request(Op.ADD, [k], number=n), KEY, st.integers(-1000, 1000)),
        st.builds(lambda ks: wire.request(Op.CHECK, ks), st.lists(KEY, min_size=1, max_size=3)),
        st.builds(lambda k: wire.request(Op.DELETE, [k]), KEY),
        st.builds(lambda ks, v: wire.request(Op.MULTI_SET, ks, [v] * len(ks)), st.lists(KEY, max_size=3), VALUE),
        st.just(wire.request(Op.CANCEL_WAIT)),
    ),
    "queues": st.one_of(
        st.builds(lambda n: wire.request(Op.PING, number=n), st.integers(0, 2**32 - 1)),
        st.builds(lambda k, v: wire.request(Op.QUEUE_PUSH, [k], [v]), QUEUE, VALUE),
        st.builds(lambda k: wire.request(Op.QUEUE_POP, [k]), QUEUE),
        st.builds(lambda k: wire.request(Op.QUEUE_LEN, [k]), QUEUE),
        st.builds(lambda k: wire.request(Op.CHECK, [k]), QUEUE),
        # Only torch's newer server answers these for keys that do not exist.
        st.builds(lambda k: wire.request(Op.GET, [k]), KEY),
        st.builds(lambda ks: wire.request(Op.MULTI_GET, ks), st.lists(KEY, max_size=3)),
        st.builds(lambda k, v: wire.request(Op.SET, [k], [v]), KEY, VALUE),
    ),
}
MARK = 0x0E0D0E0D0E0D0E0D
END = wire.request(Op.ADD, [b"/end"], number=MARK)


@pytest.fixture(scope="module", params=[True, False], ids=["libuv", "threads"])
def master(request: pytest.FixtureRequest) -> Any:
    try:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        pytest.skip("this torch is built without libuv")


async def answers(port: int, requests: bytes) -> bytes:
    """Return a server's answers to the requests, sent after the keys of earlier examples have been deleted."""
    delete = b"".join(wire.request(Op.DELETE, [key]) for key in (b"/a", b"/b", b"/c", b"/log", b"/end"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO + delete + requests + END)
    output = await asyncio.wait_for(reader.readuntil(wire.i64(MARK)), 20)
    writer.close()
    return output[40:]  # without the answers to the five deletions


async def compare(master: Any, requests: list[bytes], queues: list[bytes]) -> None:
    server = StoreServer()
    port = await server.start("127.0.0.1")
    drain = b"".join(wire.request(Op.QUEUE_POP, [key]) for key in queues * 20)
    data = b"".join(requests) + drain
    ours, theirs = await answers(port, data), await answers(int(master.port), data)
    await server.close()
    assert ours == theirs


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUESTS["plain"], max_size=25))
def test_keys(master: Any, requests: list[bytes]) -> None:
    asyncio.run(compare(master, requests, []))


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUESTS["queues"], max_size=18))
def test_queues(master: Any, requests: list[bytes]) -> None:
    if not (master.libuvBackend and hasattr(master, "queue_push")):
        pytest.skip("this torch, or its server without libuv, has no queues")
    asyncio.run(compare(master, requests, [b"/p", b"/q"]))
