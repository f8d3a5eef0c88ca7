"""An asyncio client of any TCPStore server, ours or torch's."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from elasticjob.store import wire
from elasticjob.store.wire import Op

_PREFIX = b"/"
"""Torch's clients put this before every key."""


class StoreClient:
    """Keys and values of one store. One request at a time; ConnectionError when the server is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, host: str, port: int, *, timeout: float = 5.0) -> StoreClient:
        """VALIDATE, then a question that every torch's server answers (torch's own, PING, came with 2.5)."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
        client = cls(reader, writer)
        writer.write(wire.request(Op.VALIDATE, number=wire.MAGIC))
        if not 0 <= await asyncio.wait_for(client.num_keys(), timeout) < 2**32:
            client.close()
            raise ConnectionError(f"{host}:{port} is not a TCPStore")
        return client

    def close(self) -> None:
        self._writer.close()

    async def set(self, key: str, value: bytes) -> None:
        await self._tell(wire.request(Op.SET, [_key(key)], [value]))

    async def append(self, key: str, value: bytes) -> None:
        await self._tell(wire.request(Op.APPEND, [_key(key)], [value]))

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """The value, once it exists (torch's `get` waits too). TimeoutError after `timeout` seconds."""
        await self.wait([key], timeout=timeout)
        return await self._ask_value(wire.request(Op.GET, [_key(key)]))

    async def add(self, key: str, number: int) -> int:
        return await self._ask_number(wire.request(Op.ADD, [_key(key)], number=number))

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """The value afterwards."""
        return await self._ask_value(wire.request(Op.COMPARE_SET, [_key(key)], [expected, desired]))

    async def check(self, keys: Sequence[str]) -> bool:
        return await self._ask(wire.request(Op.CHECK, [*map(_key, keys)]), 1) == b"\0"

    async def wait(self, keys: Sequence[str], *, timeout: float | None = None) -> None:
        """Until all keys exist; TimeoutError after `timeout` seconds."""
        if not await self._until(wire.request(Op.WAIT, [*map(_key, keys)]), timeout):
            raise TimeoutError(f"not within {timeout:g} s: {', '.join(keys)}")

    async def delete(self, key: str) -> bool:
        return bool(await self._ask_number(wire.request(Op.DELETE, [_key(key)])))

    async def num_keys(self) -> int:
        return await self._ask_number(wire.request(Op.GETNUMKEYS))

    async def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that exist; for others an empty one (torch's older server hangs up)."""
        async with self._exchange():
            self._writer.write(wire.request(Op.MULTI_GET, [*map(_key, keys)]))
            return [await self._sized() for _ in keys]

    async def multi_set(self, items: Mapping[str, bytes]) -> None:
        await self._tell(wire.request(Op.MULTI_SET, [*map(_key, items)], [*items.values()]))

    async def queue_push(self, key: str, value: bytes) -> None:
        await self._tell(wire.request(Op.QUEUE_PUSH, [_key(key)], [value]))

    async def queue_pop(self, key: str) -> bytes | None:
        """The queue's first value, None when it is empty; `wait` for the key before, to block."""
        async with self._exchange():
            self._writer.write(wire.request(Op.QUEUE_POP, [_key(key)]))
            return await self._sized() if await self._number() else None

    async def queue_len(self, key: str) -> int:
        return await self._ask_number(wire.request(Op.QUEUE_LEN, [_key(key)]))

    async def list_keys(self) -> list[str]:
        """Every key that a client set, without its prefix. torch 2.15 and newer."""
        async with self._exchange():
            self._writer.write(wire.request(Op.LIST_KEYS))
            keys = [await self._sized() for _ in range(await self._number())]
        return [key[len(_PREFIX) :].decode() for key in keys if key.startswith(_PREFIX)]

    async def barrier(self, key: str, world_size: int, *, timeout: float | None = None) -> None:
        """Until `world_size` clients have come; TimeoutError after `timeout` seconds. torch 2.15 and newer."""
        if not await self._until(wire.request(Op.BARRIER, [_key(key)], number=world_size), timeout):
            raise TimeoutError(f"{world_size} clients were not at {key} within {timeout:g} s")

    async def _until(self, request: bytes, timeout: float | None) -> bool:
        """Whether the server let this client go on before the time-out."""
        async with self._exchange():
            self._writer.write(request)
            with contextlib.suppress(asyncio.TimeoutError):
                # A read that is cut short has taken nothing from the stream.
                await asyncio.wait_for(self._reader.readexactly(1), timeout)
                return True
            self._writer.write(wire.request(Op.CANCEL_WAIT))
            if await self._reader.readexactly(1) == b"\0":  # it came while we gave up; the acknowledgement follows
                await self._reader.readexactly(1)
        return False

    async def _tell(self, request: bytes) -> None:
        async with self._exchange():
            self._writer.write(request)
            await self._writer.drain()

    async def _ask(self, request: bytes, size: int) -> bytes:
        async with self._exchange():
            self._writer.write(request)
            return await self._reader.readexactly(size)

    async def _ask_number(self, request: bytes) -> int:
        return int.from_bytes(await self._ask(request, 8), sys.byteorder, signed=True)

    async def _ask_value(self, request: bytes) -> bytes:
        async with self._exchange():
            self._writer.write(request)
            return await self._sized()

    async def _number(self) -> int:
        return int.from_bytes(await self._reader.readexactly(8), sys.byteorder, signed=True)

    async def _sized(self) -> bytes:
        return await self._reader.readexactly(await self._number())

    @contextlib.asynccontextmanager
    async def _exchange(self) -> AsyncIterator[None]:
        """One request and its answer. Cut short, the two sides disagree about what comes next: nothing more is said."""
        async with self._turn:
            try:
                yield
            except asyncio.IncompleteReadError:
                self.close()
                raise ConnectionResetError("the store closed the connection") from None
            except BaseException:
                self.close()
                raise


def _key(key: str) -> bytes:
    return _PREFIX + key.encode()
