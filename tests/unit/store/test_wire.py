"""The reader decodes what a client encodes, in whatever pieces the bytes arrive, and refuses invalid requests."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.store import reader as reader_module
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.reader import KnownRequests, RequestReader
from elasticjob._runtime.store.wire import Limits, Op, Request, WireError

LIMITS = Limits(key=100, value=1000, count=10)
KEY, VALUE = st.binary(max_size=20), st.binary(max_size=50)

REQUESTS = st.one_of(
    st.builds(lambda n: Request(Op.VALIDATE, number=n), st.integers(0, 2**32 - 1)),
    st.builds(lambda k, v: Request(Op.SET, (k,), (v,)), KEY, VALUE),
    st.builds(lambda k, a, b: Request(Op.COMPARE_SET, (k,), (a, b)), KEY, VALUE, VALUE),
    st.builds(lambda k, n: Request(Op.ADD, (k,), (), n), KEY, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda ks: Request(Op.WAIT, tuple(ks)), st.lists(KEY, max_size=10)),
    st.builds(
        lambda p: Request(Op.MULTI_SET, tuple(k for k, _ in p), tuple(v for _, v in p)),
        st.lists(st.tuples(KEY, VALUE), max_size=10),
    ),
    st.just(Request(Op.CANCEL_WAIT)),
)


@given(st.lists(REQUESTS, max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_requests_in_arbitrary_pieces_are_decoded(requests: list[Request], sizes: list[int]) -> None:
    data = b"".join(wire.request(r.op, r.keys, r.values, number=r.number) for r in requests)
    known = KnownRequests()
    for _ in range(2):  # two connections
        reader, decoded, at, piece = RequestReader(LIMITS, known), [], 0, 0
        while at < len(data):
            size = sizes[piece % len(sizes)]
            reader.feed(data[at : at + size])
            at, piece = at + size, piece + 1
            while (request := reader.next()) is not None:
                decoded.append(request)
        assert decoded == requests


@given(st.lists(REQUESTS, max_size=8))
def test_requests_that_other_connections_have_sent_are_decoded(requests: list[Request]) -> None:
    known = KnownRequests()
    for _ in range(2):
        reader = RequestReader(LIMITS, known)
        for request in requests:
            reader.feed(wire.request(request.op, request.keys, request.values, number=request.number))
            assert (reader.next(), reader.next(), reader.pending) == (request, None, 0)


def test_the_keys_that_all_ranks_read_are_decoded_once() -> None:
    known, keys = KnownRequests(), tuple(b"/UniqueNCCLID:%d" % root for root in range(157))
    data = wire.request(Op.MULTI_GET, keys)
    found = []
    for _ in range(2):
        reader = RequestReader(Limits(), known)
        reader.feed(bytes(bytearray(data)))
        found.append(reader.next())
    assert found[0] == Request(Op.MULTI_GET, keys)
    assert found[1] is found[0]


def test_what_is_kept_of_requests_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "KNOWN_BYTES", 1000)
    known = KnownRequests()
    reader = RequestReader(Limits(), known)
    sent = [wire.request(Op.GET, [b"/key/%d" % number]) for number in range(1000)]
    for data in [*sent, wire.request(Op.SET, [b"/key"], [b"value"])]:
        reader.feed(data)
        assert reader.next() is not None
    kept = [data for data in sent if known.find(data) is not None]
    assert 900 < sum(map(len, kept)) <= 1000
    assert kept == sent[len(sent) - len(kept) :]


@given(st.binary(max_size=400))
def test_arbitrary_bytes_decode_to_requests_or_a_wire_error(data: bytes) -> None:
    reader = RequestReader(LIMITS)
    reader.feed(data)
    with contextlib.suppress(WireError):
        while (request := reader.next()) is not None:
            assert request.op in Op


def test_a_long_list_in_small_pieces_is_decoded_once() -> None:
    keys = tuple(b"/%d" % i for i in range(5000))
    data = wire.request(Op.WAIT, keys)
    reader = RequestReader(Limits())
    decoded = 0
    reader.sized, real = (lambda *a: count(*a)), reader.sized  # type: ignore[method-assign]

    def count(at: int, limit: int, field: str) -> tuple[bytes, int]:
        nonlocal decoded
        decoded += 1
        return real(at, limit, field)

    for at in range(0, len(data), 10):
        assert reader.next() is None
        reader.feed(data[at : at + 10])
    assert reader.next() == Request(Op.WAIT, keys)
    assert reader.pending == 0
    assert decoded < 3 * len(keys)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x63", "unknown-operation"),
        (b"\x01" + struct.pack("=Q", 101), "key-too-long"),
        (b"\x01" + struct.pack("=Q", 1) + b"k" + struct.pack("=Q", 1001), "value-too-long"),
        (b"\x05" + struct.pack("=Q", 2**63), "too-many-keys"),
    ],
)
def test_an_invalid_request_is_refused_before_it_is_complete(data: bytes, reason: str) -> None:
    reader = RequestReader(LIMITS)
    reader.feed(data)
    with pytest.raises(WireError) as refused:
        reader.next()
    assert refused.value.reason == reason
