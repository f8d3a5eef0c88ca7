"""torch's TCPStore protocol as bytes, without I/O: what there is, and requests as clients write them (`reader` reads).

Numbers are native-endian. A key or value is a u64 length and its bytes; a request is one byte, `Op`, and the fields
that `FIELDS` lists. A client opens with VALIDATE. Source: torch 2.15; torch from 2.4 on speaks it, with fewer
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

U32 = struct.Struct("=I")
U64 = struct.Struct("=Q")
I64 = struct.Struct("=q")


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
    opening_timeout: float = 5.0
    """Seconds for a new connection to say what it is."""
    write_buffer: int = 1 * MIB
    """Answers waiting for a client; one that has more is not read from until it has read them."""
    total_write_buffer: int = 128 * MIB
    """Answers waiting for all such clients together."""
    stall_timeout: float = 30.0
    """Seconds that a client may leave it at that, or be silent in the middle of a request."""


class WireError(Exception):
    """What a client sent cannot be served: close the connection, count it under `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Request(NamedTuple):
    """One request; which fields it uses depends on `op` (`FIELDS`). A tuple: a busy store makes many a second."""

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class Field(Enum):
    """A part of a request."""

    KEY = "key"
    VALUE = "value"
    I64 = "i64"
    U32 = "u32"
    KEYS = "keys"
    """A count and as many keys."""
    PAIRS = "pairs"
    """A count and as many keys, each with its value."""


FIELDS: dict[Op, tuple[Field, ...]] = {
    Op.VALIDATE: (Field.U32,),
    Op.SET: (Field.KEY, Field.VALUE),
    Op.COMPARE_SET: (Field.KEY, Field.VALUE, Field.VALUE),
    Op.GET: (Field.KEY,),
    Op.ADD: (Field.KEY, Field.I64),
    Op.CHECK: (Field.KEYS,),
    Op.WAIT: (Field.KEYS,),
    Op.GETNUMKEYS: (),
    Op.DELETE: (Field.KEY,),
    Op.APPEND: (Field.KEY, Field.VALUE),
    Op.MULTI_GET: (Field.KEYS,),
    Op.MULTI_SET: (Field.PAIRS,),
    Op.CANCEL_WAIT: (),
    Op.PING: (Field.U32,),
    Op.QUEUE_PUSH: (Field.KEY, Field.VALUE),
    Op.QUEUE_POP: (Field.KEY,),
    Op.QUEUE_LEN: (Field.KEY,),
    Op.LIST_KEYS: (),
    Op.BARRIER: (Field.KEY, Field.I64),
    Op.LINK: (Field.U32,),
}


def u32(value: int) -> bytes:
    """4 bytes."""
    return U32.pack(value)


def i64(value: int) -> bytes:
    """8 bytes, signed."""
    return I64.pack(value)


def sized(value: bytes) -> bytes:
    """A key or a value, with its length."""
    return U64.pack(len(value)) + value


def request(op: Op, keys: Sequence[bytes] = (), values: Sequence[bytes] = (), number: int = 0) -> bytes:
    """One request as a client sends it."""
    parts = [bytes((op,))]
    for kind in FIELDS[op]:
        match kind:
            case Field.KEY:
                parts.append(sized(keys[0]))
            case Field.VALUE:
                # COMPARE_SET has two, one after the other: both are written at the first.
                parts += map(sized, values)
                break
            case Field.I64:
                parts.append(i64(number))
            case Field.U32:
                parts.append(u32(number))
            case Field.KEYS:
                parts += [U64.pack(len(keys)), *map(sized, keys)]
            case Field.PAIRS:
                pairs = (sized(key) + sized(value) for key, value in zip(keys, values, strict=True))
                parts += [U64.pack(len(keys)), *pairs]
    return b"".join(parts)
