"""Requests out of the bytes of a TCPStore client, in whatever pieces they come. No I/O."""

from __future__ import annotations

import struct

from elasticjob.store.wire import FIELDS, I64, U32, U64, Field, Limits, Op, Request, WireError

_BY_BYTE = {int(op): (op, fields) for op, fields in FIELDS.items()}


class _Short(Exception):  # noqa: N818
    """More bytes are needed, at least up to position `end`."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end


class RequestReader:
    """`feed` what arrives, then take requests with `next` until it gives None. WireError: close the connection."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer: bytes | bytearray = b""
        self._at = 0
        self._need = 1
        """No attempt below this length of the buffer, so that a big value is not looked at for every piece of it."""
        self._list: list[bytes] = []
        """What has been read of a long list, and where it goes on: read once, in however many pieces it comes."""
        self._resume = 0

    @property
    def pending(self) -> int:
        """Bytes held for a request that has not arrived in full."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes) -> None:
        """Add what arrived."""
        if self._at == len(self._buffer):
            self._buffer, self._at, self._need = data, 0, 1
            return
        if self._at or isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer[self._at :])
            self._need -= self._at
            self._resume = max(0, self._resume - self._at)
            self._at = 0
        self._buffer += data

    def rest(self) -> bytes:
        """What was fed and not read; the reader is empty afterwards."""
        rest = bytes(self._buffer[self._at :])
        self._buffer, self._at, self._need = b"", 0, 1
        return rest

    def next(self) -> Request | None:
        """The next request, None until all of it is there."""
        at = self._at
        if at == len(self._buffer) or len(self._buffer) < self._need:
            return None
        try:
            op, fields = _BY_BYTE[self._buffer[at]]
        except KeyError:
            raise WireError("unknown-operation", f"operation {self._buffer[at]} does not exist") from None
        try:
            return self._read(op, fields, at + 1)
        except _Short as short:
            if short.end - at > self._limits.request:
                raise WireError("request-too-long", f"a request of more than {self._limits.request} bytes") from None
            self._need = short.end
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
        self._at, self._need = at, at + 1
        return Request(op, keys, values, number)

    def _number(self, kind: struct.Struct, at: int) -> tuple[int, int]:
        end = at + kind.size
        if end > len(self._buffer):
            raise _Short(end)
        return int(kind.unpack_from(self._buffer, at)[0]), end

    def _key(self, at: int) -> tuple[bytes, int]:
        return self._sized(at, self._limits.key, "key")

    def _value(self, at: int) -> tuple[bytes, int]:
        return self._sized(at, self._limits.value, "value")

    def _sized(self, at: int, limit: int, what: str) -> tuple[bytes, int]:
        size, at = self._number(U64, at)
        if size > limit:
            raise WireError(f"{what}-too-long", f"a {what} of {size} bytes; {limit} are allowed")
        end = at + size
        if end > len(self._buffer):
            raise _Short(end)
        return bytes(self._buffer[at:end]), end

    def _items(self, at: int, width: int) -> tuple[list[bytes], int]:
        """`width` (a key, or a key and its value) items for each of the count."""
        count, at = self._number(U64, at)
        if count > self._limits.count:
            raise WireError("too-many-keys", f"{count} keys in one request; {self._limits.count} are allowed")
        items, at = self._list, max(at, self._resume)
        total = count * width
        try:
            while len(items) < total:
                item, at = self._value(at) if len(items) % width else self._key(at)
                items.append(item)
        except _Short as short:
            self._resume = at
            raise _Short(max(short.end, at + 8 * (total - len(items)))) from None
        self._list, self._resume = [], 0
        return items, at
