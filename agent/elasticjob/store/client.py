"""An asyncio client of any TCPStore server, ours or torch's."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence

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
        """Open as torch does: VALIDATE, then a PING that must come back."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
        client = cls(reader, writer)
        nonce = secrets.randbits(32)
        writer.write(wire.request(Op.VALIDATE, number=wire.MAGIC))
        echo = await asyncio.wait_for(client._ask(wire.request(Op.PING, number=nonce), 4), timeout)
        if echo != wire.u32(nonce):
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
        async with self._turn:
            self._writer.write(wire.request(Op.WAIT, [*map(_key, keys)]))
            # A read that is cut short by the time-out has taken nothing from the stream.
            waiting = asyncio.ensure_future(self._reader.readexactly(1))
            done, _ = await asyncio.wait([waiting], timeout=timeout)
            if done:
                waiting.result()
                return
            self._writer.write(wire.request(Op.CANCEL_WAIT))
            if await waiting == b"\0":  # it came while we gave up; the acknowledgement follows
                await self._reader.readexactly(1)
        raise TimeoutError(f"not within {timeout:g} s: {', '.join(keys)}")

    async def delete(self, key: str) -> bool:
        return bool(await self._ask_number(wire.request(Op.DELETE, [_key(key)])))

    async def num_keys(self) -> int:
        return await self._ask_number(wire.request(Op.GETNUMKEYS))

    async def _tell(self, request: bytes) -> None:
        async with self._turn:
            self._writer.write(request)
            await self._writer.drain()

    async def _ask(self, request: bytes, size: int) -> bytes:
        async with self._turn:
            self._writer.write(request)
            return await self._reader.readexactly(size)

    async def _ask_number(self, request: bytes) -> int:
        return int.from_bytes(await self._ask(request, 8), sys.byteorder, signed=True)

    async def _ask_value(self, request: bytes) -> bytes:
        async with self._turn:
            self._writer.write(request)
            size = int.from_bytes(await self._reader.readexactly(8), sys.byteorder)
            return await self._reader.readexactly(size)


def _key(key: str) -> bytes:
    return _PREFIX + key.encode()
