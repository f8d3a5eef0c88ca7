"""The server of the default store: a process of its own, so that it outlives the rank that starts it.

A server inside the rank would end with it, and stop when it is stopped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import time

from elasticjob._runtime.store.last_requests import LastRequests
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.system.code_root import python_command
from elasticjob._runtime.system.daemon_threads import run_without_joining
from elasticjob._runtime.system.loop_errors import call_on_error
from elasticjob._runtime.system.sockets.listening_socket import listen_on_all_addresses

_BACKLOG = 4096
"""Connections that wait until the server accepts them."""
_CHECK_INTERVAL = 0.02
"""Seconds between two checks for connections once the rank has ended: the next job may need the port at once."""
BIND_TIMEOUT = 5.0
"""Seconds that the server of the last job has to release the port."""

_servers: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
"""Servers that this process has started, by port, with the end of the pipe that shows that this process runs."""


def serve(port: int) -> int:
    """Serve a store on a port, which accepts connections from now on; return the port. A second call does nothing.

    The server ends when this process has ended and no client is connected. OSError: the port is in use.
    """
    if port in _servers and _servers[port][1].poll() is None:
        return port
    with listen(port) as listener:
        bound = int(listener.getsockname()[1])
        parent, own = os.pipe()
        arguments = [str(listener.fileno()), str(parent)]
        process = subprocess.Popen(
            python_command("elasticjob.inprocess._stores.store_server", *arguments),
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), parent),
            start_new_session=True,
        )
        os.close(parent)
    _servers[bound] = own, process
    return bound


def main(arguments: list[str]) -> None:
    """Serve. Arguments: the descriptor of the listening socket, and that of the pipe from the rank."""
    logging.basicConfig(format="elasticjob store: %(message)s")
    raise_open_file_limit()
    run_without_joining(_serve(socket.socket(fileno=int(arguments[0])), int(arguments[1])))


async def _serve(listener: socket.socket, parent: int) -> None:
    server = StoreServer(last_requests=LastRequests())
    await server.start(sock=listener)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    call_on_error(loop, lambda error: None if ended.done() else ended.set_exception(error))
    loop.add_reader(parent, lambda: None if ended.done() else ended.set_result(None))  # end of file: the rank has ended
    await ended
    loop.remove_reader(parent)
    while server.open_connections:  # noqa: ASYNC110  (the server has no event for it)
        await asyncio.sleep(_CHECK_INTERVAL)
    await server.close()


def listen(port: int) -> socket.socket:
    """Return a listening socket. A port that is in use is tried again for a while."""
    deadline = time.monotonic() + BIND_TIMEOUT
    while True:
        try:
            return listen_on_all_addresses(port, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
            time.sleep(_CHECK_INTERVAL)
