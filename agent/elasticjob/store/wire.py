"""torch's TCPStore protocol as bytes, without I/O: requests both ways, read in whatever pieces they come.

Numbers are native-endian. A key or value is a u64 length and its bytes; a request is one byte, `Op`, and the fields
that `_FIELDS` lists. A client opens with VALIDATE. Source: torch 2.15; torch from 2.4 on speaks it, with fewer
operations. torch 2.1 opens without VALIDATE and numbers its operations from SET = 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

MAGIC = 0x3C85F7CE
MIB = 1024 * 1024

_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_I64 = struct.Struct("=q")


class Op(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18
    LINK = 0xE7
    """Ours, far from torch's numbers, which grow: what follows is a control link (`link.py`)."""


@dataclass(frozen=True)
class Limits:
    """What one server grants. Bytes and seconds; sizes of keys, values and counts are those of torch's server."""

    key: int = 8 * 1024
    value: int = 8 * MIB
    count: int = 128 * 1024
    """Keys in one request."""
    request: int = 32 * MIB
    reply: int = 32 * MIB
    memory: int = 256 * MIB
    """All keys and values, and requests that have arrived in part."""
    connections: int = 16 * 1024
    opening: float = 5.0
    """Seconds for a new connection to say what it is."""
    write_buffer: int = 1 * MIB
    """Answers waiting for a client; one that has more is not read from until it has read them."""
    backlog: int = 128 * MIB
    """Answers waiting for all such clients together."""
    stall: float = 30.0
    """Seconds that a client may leave it at that, or be silent in the middle of a request."""


class WireError(Exception):
    """What a client sent cannot be served: close the connection, count it under `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Request(NamedTuple):
    """One request; which fields it uses depends on `op` (`_FIELDS`). A tuple: a busy store makes many a second."""

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class _Field(Enum):
    KEY = "key"
    VALUE = "value"
    I64 = "i64"
    U32 = "u32"
    KEYS = "keys"
    """A count and as many keys."""
    PAIRS = "pairs"
    """A count and as many keys, each with its value."""


_FIELDS: dict[Op, tuple[_Field, ...]] = {
    Op.VALIDATE: (_Field.U32,),
    Op.SET: (_Field.KEY, _Field.VALUE),
    Op.COMPARE_SET: (_Field.KEY, _Field.VALUE, _Field.VALUE),
    Op.GET: (_Field.KEY,),
    Op.ADD: (_Field.KEY, _Field.I64),
    Op.CHECK: (_Field.KEYS,),
    Op.WAIT: (_Field.KEYS,),
    Op.GETNUMKEYS: (),
    Op.DELETE: (_Field.KEY,),
    Op.APPEND: (_Field.KEY, _Field.VALUE),
    Op.MULTI_GET: (_Field.KEYS,),
    Op.MULTI_SET: (_Field.PAIRS,),
    Op.CANCEL_WAIT: (),
    Op.PING: (_Field.U32,),
    Op.QUEUE_PUSH: (_Field.KEY, _Field.VALUE),
    Op.QUEUE_POP: (_Field.KEY,),
    Op.QUEUE_LEN: (_Field.KEY,),
    Op.LIST_KEYS: (),
    Op.BARRIER: (_Field.KEY, _Field.I64),
    Op.LINK: (_Field.U32,),
}
_BY_BYTE = {int(op): (op, fields) for op, fields in _FIELDS.items()}


# ---- writing


def u32(value: int) -> bytes:
    """4 bytes."""
    return _U32.pack(value)


def i64(value: int) -> bytes:
    """8 bytes, signed."""
    return _I64.pack(value)


def sized(value: bytes) -> bytes:
    """A key or a value, with its length."""
    return _U64.pack(len(value)) + value


def request(op: Op, keys: Sequence[bytes] = (), values: Sequence[bytes] = (), number: int = 0) -> bytes:
    """One request as a client sends it."""
    parts = [bytes((op,))]
    for kind in _FIELDS[op]:
        match kind:
            case _Field.KEY:
                parts.append(sized(keys[0]))
            case _Field.VALUE:
                # COMPARE_SET has two, one after the other: both are written at the first.
                parts += map(sized, values)
                break
            case _Field.I64:
                parts.append(i64(number))
            case _Field.U32:
                parts.append(u32(number))
            case _Field.KEYS:
                parts += [_U64.pack(len(keys)), *map(sized, keys)]
            case _Field.PAIRS:
                pairs = (sized(key) + sized(value) for key, value in zip(keys, values, strict=True))
                parts += [_U64.pack(len(keys)), *pairs]
    return b"".join(parts)


# ---- reading


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

    def _read(self, op: Op, fields: tuple[_Field, ...], at: int) -> Request:
        keys: tuple[bytes, ...] = ()
        values: tuple[bytes, ...] = ()
        number = 0
        for kind in fields:
            if kind is _Field.KEY:
                key, at = self._key(at)
                keys = (key,)
            elif kind is _Field.VALUE:
                value, at = self._value(at)
                values += (value,)
            elif kind is _Field.I64:
                number, at = self._number(_I64, at)
            elif kind is _Field.U32:
                number, at = self._number(_U32, at)
            else:
                width = 2 if kind is _Field.PAIRS else 1
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
        size, at = self._number(_U64, at)
        if size > limit:
            raise WireError(f"{what}-too-long", f"a {what} of {size} bytes; {limit} are allowed")
        end = at + size
        if end > len(self._buffer):
            raise _Short(end)
        return bytes(self._buffer[at:end]), end

    def _items(self, at: int, width: int) -> tuple[list[bytes], int]:
        """`width` (a key, or a key and its value) items for each of the count."""
        count, at = self._number(_U64, at)
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
