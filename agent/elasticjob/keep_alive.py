"""Kernel TCP keep-alive, for control links and for plain clients of a store."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class KeepAlive:
    """Keep-alive settings: the kernel detects a vanished peer after `interval` x `max_attempts` seconds."""

    interval: float = 1.0
    """Seconds between probes, rounded to whole seconds, at least 1."""
    max_attempts: int = 3

    def apply(self, sock: socket.socket) -> None:
        """Set the options of a connected TCP socket."""
        interval = max(1, round(self.interval))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self.max_attempts)
        # The kernel sends no probes while sent data is unacknowledged; this option limits that time.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, interval * self.max_attempts * 1000)
