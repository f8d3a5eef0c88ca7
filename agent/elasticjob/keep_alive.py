"""TCP keep-alive of the kernel, for control links and for plain clients of a store."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class KeepAlive:
    """Kernel TCP keep-alive: a peer that vanished without a word is noticed after interval x attempts seconds."""

    interval: float = 1.0
    max_attempts: int = 3

    def apply(self, sock: socket.socket) -> None:
        """Set the options of a connected TCP socket."""
        interval = max(1, round(self.interval))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self.max_attempts)
        # Keep-alive does not run while data is on its way; this bounds that case.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, interval * self.max_attempts * 1000)
