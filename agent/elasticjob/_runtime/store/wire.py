"""torch's TCPStore protocol: operations, limits, and how clients encode requests. No I/O. `reader` decodes requests.

A request is one byte, the `Op`, and the fields that `FIELDS` lists for it. A key or value is a u64 length and its
bytes; numbers are native-endian. A client's first request is VALIDATE, with a magic number. Answers carry no
operation: a client matches them to its requests by their order. SET, APPEND, MULTI_SET and QUEUE_PUSH have no answer.

Source: torch 2.15. torch 2.4 and newer use this protocol; older versions lack some of the operations. torch 2.1 and
older send no VALIDATE, and number their operations from SET = 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

MAGIC = 0x3C85F7CE
"""Number in a VALIDATE request."""
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
    """Ours: the connection becomes a control link (`control_link.link`). Far from torch's numbers, which grow."""
    WHEN_LOST = 0xE8
    """Ours, without an answer: requests that the server executes when all connections of this name have closed, and
    none if the value is empty (`LastRequests`). Only a server that was started with them knows it."""


@dataclass(frozen=True)
class Limits:
    """Limits of one server, in bytes and seconds. Those of keys, values and counts are the limits of torch's server."""

    key: int = 8 * 1024
    value: int = 8 * MIB
    count: int = 128 * 1024
    """Keys in one request."""
    request: int = 32 * MIB
    """One request in all."""
    reply: int = 32 * MIB
    """Answer to one request."""
    memory: int = 256 * MIB
    """All keys and values, pending waits, and partly received requests."""
    connections: int = 16 * 1024
    """Open connections, control links included."""
    unauthenticated: int = 1024
    """Open connections that are not authenticated yet. One more closes the oldest of them."""
    unauthenticated_bytes: int = 16 * 1024
    """Unread bytes of a connection that is not authenticated yet."""
    opening_timeout: float = 5.0
    """Seconds from the start of a connection to its first request (VALIDATE or LINK)."""
    link_timeout: float = 10.0
    """Seconds that a client waits for its agent's control link (`StoreClients.NODES`)."""
    write_buffer: int = 1 * MIB
    """Unread answers of one client. Beyond it the client is a slow reader: its requests wait until it has read them."""
    total_write_buffer: int = 128 * MIB
    """Unread answers of all slow readers together."""
    stall_timeout: float = 30.0
    """Seconds that a client may be a slow reader, or pause within a request."""


class WireError(Exception):
    """A client violated the protocol or a limit. The server closes its connection and counts it under `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Request(NamedTuple):
    """One request. `FIELDS` lists the fields that an `op` uses. A tuple, because it is fast to create."""

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class Field(Enum):
    """Kinds of fields of a request."""

    KEY = "key"
    VALUE = "value"
    I64 = "i64"
    U32 = "u32"
    KEYS = "keys"
    """A u64 count and that many keys."""
    PAIRS = "pairs"
    """A u64 count and that many keys, each followed by its value."""


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
    Op.WHEN_LOST: (Field.KEY, Field.VALUE),
}


def u32(value: int) -> bytes:
    """Return the 4 bytes of an unsigned number."""
    return U32.pack(value)


def i64(value: int) -> bytes:
    """Return the 8 bytes of a signed number."""
    return I64.pack(value)


def sized(value: bytes | bytearray) -> bytes:
    """Return a key or a value with its length before it."""
    return U64.pack(len(value)) + value


def request(op: Op, keys: Sequence[bytes] = (), values: Sequence[bytes] = (), number: int = 0) -> bytes:
    """Return one request as a client sends it."""
    parts = [bytes((op,))]
    for kind in FIELDS[op]:
        match kind:
            case Field.KEY:
                parts.append(sized(keys[0]))
            case Field.VALUE:
                # Values are the last fields. COMPARE_SET has two of them; both are written here.
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
