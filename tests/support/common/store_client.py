"""An asyncio client for any TCPStore server, ours or torch's."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from elasticjob._runtime.store import wire
from elasticjob._runtime.store.wire import Op

_PREFIX = b"/"
"""torch's clients put this before every key."""


class StoreClient:
    """A connection to one store. Requests of several tasks are sent one after another.

    Every method raises ConnectionError once the server has closed the connection. A request that is cancelled or fails
    closes the connection too, because client and server no longer agree on what the next bytes are.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(cls, host: str, port: int, *, timeout: float = 5.0) -> StoreClient:
        """Connect. ConnectionError: the server is not a TCPStore; TimeoutError: no answer within `timeout` seconds."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
        client = cls(reader, writer)
        writer.write(wire.request(Op.VALIDATE, number=wire.MAGIC))
        # torch's own client checks the server with PING, which torch 2.4 lacks; GETNUMKEYS works with every version.
        if not 0 <= await asyncio.wait_for(client.num_keys(), timeout) < 2**32:
            client.close()
            raise ConnectionError(f"{host}:{port} is not a TCPStore")
        return client

    def close(self) -> None:
        self._writer.close()

    async def set(self, key: str, value: bytes) -> None:
        await self._send(wire.request(Op.SET, [_key(key)], [value]))

    async def append(self, key: str, value: bytes) -> None:
        await self._send(wire.request(Op.APPEND, [_key(key)], [value]))

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Wait until the key exists, as torch's `get` does; return its value. TimeoutError after `timeout` seconds."""
        await self.wait([key], timeout=timeout)
        return await self._ask_value(wire.request(Op.GET, [_key(key)]))

    async def add(self, key: str, number: int) -> int:
        """Add `number` to the value, 0 if the key is missing; return the sum."""
        return await self._ask_number(wire.request(Op.ADD, [_key(key)], number=number))

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the value `expected` by `desired`; return the value that the key has afterwards."""
        return await self._ask_value(wire.request(Op.COMPARE_SET, [_key(key)], [expected, desired]))

    async def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return await self._ask(wire.request(Op.CHECK, [*map(_key, keys)]), 1) == b"\0"

    async def wait(self, keys: Sequence[str], *, timeout: float | None = None) -> None:
        """Wait until all keys exist. TimeoutError after `timeout` seconds."""
        if not await self._await_release(wire.request(Op.WAIT, [*map(_key, keys)]), timeout):
            raise TimeoutError(f"keys {', '.join(keys)} did not all exist within {timeout:g} s")

    async def delete(self, key: str) -> bool:
        """Delete the key; return whether it existed."""
        return bool(await self._ask_number(wire.request(Op.DELETE, [_key(key)])))

    async def num_keys(self) -> int:
        return await self._ask_number(wire.request(Op.GETNUMKEYS))

    async def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values, empty for a missing key. For that, torch's older server closes the connection instead."""
        async with self._exchange():
            self._writer.write(wire.request(Op.MULTI_GET, [*map(_key, keys)]))
            return [await self._sized() for _ in keys]

    async def multi_set(self, items: Mapping[str, bytes]) -> None:
        await self._send(wire.request(Op.MULTI_SET, [*map(_key, items)], [*items.values()]))

    async def queue_push(self, key: str, value: bytes) -> None:
        await self._send(wire.request(Op.QUEUE_PUSH, [_key(key)], [value]))

    async def queue_pop(self, key: str) -> bytes | None:
        """Remove and return the queue's first value, None if the queue is empty. To block, `wait` for the key first."""
        async with self._exchange():
            self._writer.write(wire.request(Op.QUEUE_POP, [_key(key)]))
            return await self._sized() if await self._number() else None

    async def queue_len(self, key: str) -> int:
        return await self._ask_number(wire.request(Op.QUEUE_LEN, [_key(key)]))

    async def list_keys(self) -> list[str]:
        """Return every key that a client set, without the prefix. Needs torch 2.15 or newer."""
        async with self._exchange():
            self._writer.write(wire.request(Op.LIST_KEYS))
            keys = [await self._sized() for _ in range(await self._number())]
        return [key[len(_PREFIX) :].decode() for key in keys if key.startswith(_PREFIX)]

    async def barrier(self, key: str, world_size: int, *, timeout: float | None = None) -> None:
        """Wait until `world_size` clients have arrived. TimeoutError after `timeout` seconds. Needs torch 2.15."""
        if not await self._await_release(wire.request(Op.BARRIER, [_key(key)], number=world_size), timeout):
            raise TimeoutError(f"{world_size} clients did not reach barrier {key} within {timeout:g} s")

    async def _await_release(self, request: bytes, timeout: float | None) -> bool:
        """Send a request that the server answers when a condition holds; return whether it did before the time-out."""
        async with self._exchange():
            self._writer.write(request)
            with contextlib.suppress(asyncio.TimeoutError):
                # readexactly takes nothing from the stream if it is cancelled.
                await asyncio.wait_for(self._reader.readexactly(1), timeout)
                return True
            self._writer.write(wire.request(Op.CANCEL_WAIT))
            if await self._reader.readexactly(1) == b"\0":  # the answer crossed CANCEL_WAIT, whose own answer follows
                await self._reader.readexactly(1)
        return False

    async def _send(self, request: bytes) -> None:
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
        """Hold the connection for one request and its answer; close it if the body fails."""
        async with self._lock:
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
