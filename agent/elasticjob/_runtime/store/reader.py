"""Decode the requests of a TCPStore client from its bytes, in whatever pieces they arrive. No I/O.

Limits are checked as soon as a length has arrived, before memory is held for the field. Decoding restarts at a
request's first byte when more bytes have arrived; two measures keep that linear for large requests. `next` does
nothing before the field that was incomplete can be complete, and the items of a list are decoded once.

While a process group forms, all its ranks read the same keys, by the same bytes. `KnownRequests` decodes them once.
"""

from __future__ import annotations

import struct

from elasticjob._runtime.store.wire import FIELDS, I64, U32, U64, Field, Limits, Op, Request, WireError

_BY_BYTE = {int(op): (op, fields) for op, fields in FIELDS.items()}
_REPEATED = frozenset(map(int, (Op.GET, Op.CHECK, Op.WAIT, Op.MULTI_GET)))
"""Operations that many clients send with the same bytes."""
_LONGEST_KNOWN = 64 * 1024
"""Bytes of the longest request that is kept: 1000 keys and more."""
KNOWN_BYTES = 512 * 1024
"""Bytes of all requests that are kept, a constant part of a server's memory."""


class _Incomplete(Exception):  # noqa: N818
    """The request is incomplete: the buffer must extend at least to position `end`."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end


class KnownRequests:
    """Requests that clients of one server have sent, by their bytes."""

    def __init__(self) -> None:
        self._requests: dict[bytes, Request] = {}
        self._size = 0

    def find(self, data: bytes | bytearray) -> Request | None:
        """Return the request that is exactly this data; None if it is not known."""
        if type(data) is not bytes or len(data) > _LONGEST_KNOWN or data[0] not in _REPEATED:
            return None
        return self._requests.get(data)

    def add(self, data: bytes | bytearray, request: Request) -> None:
        """Keep a request if other clients are likely to send the same. The oldest ones are dropped for it."""
        if type(data) is not bytes or len(data) > _LONGEST_KNOWN or request.op not in _REPEATED:
            return
        self._requests[data] = request
        self._size += len(data)
        while self._size > KNOWN_BYTES:
            oldest = next(iter(self._requests))
            del self._requests[oldest]
            self._size -= len(oldest)


class RequestReader:
    """Decoder of one connection: `feed` it what arrives, then call `next` until it returns None."""

    def __init__(self, limits: Limits, known: KnownRequests | None = None) -> None:
        """`known`: the requests that all connections of a server share."""
        self._limits = limits
        self._known = known or KnownRequests()
        self._buffer: bytes | bytearray = b""
        self._at = 0
        """Position of the first byte that is not decoded yet."""
        self._need = 1
        """Length of the buffer below which the next request is certainly incomplete."""
        self._items_read: list[bytes] = []
        """Items decoded so far of the incomplete list at `_at`."""
        self._items_end = 0
        """Position after those items."""

    @property
    def pending(self) -> int:
        """Bytes that are held for an incomplete request."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived."""
        if self._at == len(self._buffer):
            self._buffer, self._at, self._need = data, 0, 1
            return
        if self._at or isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer[self._at :])
            self._need -= self._at
            self._items_end = max(0, self._items_end - self._at)
            self._at = 0
        self._buffer += data

    def rest(self) -> bytes:
        """Return the bytes that are not decoded yet, and forget them."""
        rest = bytes(self._buffer[self._at :])
        self._buffer, self._at, self._need = b"", 0, 1
        return rest

    def next(self) -> Request | None:
        """Return the next request, None until it is complete. WireError: the connection must be closed."""
        at = self._at
        if at == len(self._buffer) or len(self._buffer) < self._need:
            return None
        if at == 0 and (known := self._known.find(self._buffer)) is not None:
            self._at, self._need = len(self._buffer), len(self._buffer) + 1
            return known
        try:
            op, fields = _BY_BYTE[self._buffer[at]]
        except KeyError:
            raise WireError("unknown-operation", f"operation {self._buffer[at]} is unknown") from None
        try:
            return self._read(op, fields, at + 1)
        except _Incomplete as incomplete:
            if incomplete.end - at > self._limits.request:
                raise WireError("request-too-long", f"a request exceeds {self._limits.request} bytes") from None
            self._need = incomplete.end
            return None

    def _read(self, op: Op, fields: tuple[Field, ...], at: int) -> Request:
        keys: tuple[bytes, ...] = ()
        values: tuple[bytes, ...] = ()
        number = 0
        for kind in fields:
            if kind is Field.KEY:
                key, at = self._key(at)
                keys = (key,)
            elif kind is Field.VALUE:
                value, at = self._value(at)
                values += (value,)
            elif kind is Field.I64:
                number, at = self._number(I64, at)
            elif kind is Field.U32:
                number, at = self._number(U32, at)
            else:
                width = 2 if kind is Field.PAIRS else 1
                items, at = self._items(at, width)
                keys, values = tuple(items[::width]), tuple(items[1::2]) if width == 2 else ()
        is_whole_buffer = self._at == 0 and at == len(self._buffer)
        self._at, self._need = at, at + 1
        request = Request(op, keys, values, number)
        if is_whole_buffer:
            self._known.add(self._buffer, request)
        return request

    def _number(self, kind: struct.Struct, at: int) -> tuple[int, int]:
        end = at + kind.size
        if end > len(self._buffer):
            raise _Incomplete(end)
        return int(kind.unpack_from(self._buffer, at)[0]), end

    def _key(self, at: int) -> tuple[bytes, int]:
        return self.sized(at, self._limits.key, "key")

    def _value(self, at: int) -> tuple[bytes, int]:
        return self.sized(at, self._limits.value, "value")

    def sized(self, at: int, limit: int, field: str) -> tuple[bytes, int]:
        size, at = self._number(U64, at)
        if size > limit:
            raise WireError(f"{field}-too-long", f"a {field} has {size} bytes; {limit} bytes are allowed")
        end = at + size
        if end > len(self._buffer):
            raise _Incomplete(end)
        return bytes(self._buffer[at:end]), end

    def _items(self, at: int, width: int) -> tuple[list[bytes], int]:
        """Decode a list: a count, and `width` items for each (1: a key; 2: a key and its value)."""
        count, at = self._number(U64, at)
        if count > self._limits.count:
            raise WireError("too-many-keys", f"a request has {count} keys; {self._limits.count} keys are allowed")
        items, at = self._items_read, max(at, self._items_end)
        total = count * width
        try:
            while len(items) < total:
                item, at = self._value(at) if len(items) % width else self._key(at)
                items.append(item)
        except _Incomplete as incomplete:
            self._items_end = at
            # Every missing item has at least its length, of 8 bytes.
            raise _Incomplete(max(incomplete.end, at + 8 * (total - len(items)))) from None
        self._items_read, self._items_end = [], 0
        return items, at
