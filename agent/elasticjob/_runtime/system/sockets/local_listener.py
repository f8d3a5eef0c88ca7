"""A Unix socket on which processes of this pod connect to the agent: one task serves each connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from elasticjob._runtime.system.loop_errors import background_task

_BACKLOG = 64


class LocalListener:
    """Listens on `path` in the running event loop, and closes each connection once `serve` has returned.

    An error that `serve` raises reaches the event loop's handler: it is a mistake of this process, not of a peer.
    """

    def __init__(self, path: Path, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        """OSError: nothing can listen on `path`. `serve` gets a socket that does not block."""
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop listening, and cancel the tasks that serve connections."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            task = background_task(self._serve_and_close(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_and_close(self, peer: socket.socket) -> None:
        with peer:
            await self._serve(peer)


async def until_readable(peer: socket.socket) -> None:
    """Wait until the socket can be read: asyncio cannot receive descriptors."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)
