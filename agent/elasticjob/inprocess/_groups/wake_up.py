"""Wake the threads for which an abort of nccl waits.

`ncclCommAbort` sets a flag and waits until the communicator's proxy service thread has seen it. That thread looks at it
when its `poll` returns, each 500 ms while nothing happens, so an abort takes 0.51 s (seen on an H100, NCCL 2.28.9). The
socket on which the thread accepts connections is among those that it polls: a connection to it ends the `poll`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from elasticjob.inprocess._groups.own_sockets import ip_sockets, listens

_INTERVAL = 0.01
_TRIES = 50
"""The flag is set a moment after the abort has begun: a thread that was woken before sleeps again. After 0.5 s, the
threads have woken up by themselves, and the abort waits for something else."""
_CONNECT_TIMEOUT = 0.05


def wake_while(running: Iterable[threading.Thread], before: Iterable[tuple[Any, ...]]) -> None:
    """Connect to the sockets of this process that listen, again and again, until the threads have ended.

    `before`: addresses that are left alone, because they were not made by nccl. No byte is sent.
    """
    threads, left_alone = list(running), set(before)
    for _ in range(_TRIES):
        if not any(thread.is_alive() for thread in threads):
            return
        for family, address in _listening():
            if address not in left_alone:
                _connect_and_close(family, address)
        time.sleep(_INTERVAL)


def _listening() -> set[tuple[int, tuple[Any, ...]]]:
    found = set()
    for _, sock in ip_sockets():
        with suppress(OSError):
            if listens(sock):
                found.add((int(sock.family), sock.getsockname()))
    return found


def _connect_and_close(family: int, address: tuple[Any, ...]) -> None:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        connection.connect(address)
