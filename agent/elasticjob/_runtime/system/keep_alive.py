"""Kernel TCP keep-alive, for control links and for plain clients of a store."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO = struct.Struct("=3xB20xI24x2I")
"""Of Linux's `struct tcp_info`: tcpi_probes, tcpi_unacked, tcpi_last_data_recv and tcpi_last_ack_recv; the times are
in milliseconds."""


@dataclass(frozen=True)
class KeepAlive:
    """Keep-alive settings: the kernel detects a vanished peer within `timeout` seconds."""

    interval: float = 1.0
    """Seconds between probes, rounded to whole seconds, at least 1."""
    max_attempts: int = 3
    """Fewer than 3 count as 3: `trust` has to be longer than one interval."""

    @property
    def timeout(self) -> int:
        """Seconds without an answer after which the kernel closes a connection."""
        return self._seconds * self._attempts

    @property
    def trust(self) -> float:
        """Seconds after the peer's last answer in which this side may assume that the peer has not closed the link.

        Each side sends a probe once an interval. When the network parts, the peer's last answer is one interval old at
        most, so it closes the link no earlier than `timeout` less an interval from then on. This side's last answer may
        be that recent. A quarter of an interval is left for what this side does then.
        """
        return self.timeout - 1.25 * self._seconds

    @property
    def repair_time(self) -> float:
        """The last seconds of `trust`, in which this side sends data to a peer that has not answered.

        The answer to a probe is never so late, unless a packet was lost. TCP repeats data within some 0.2 s.
        """
        return 0.5 * self._seconds

    @property
    def _seconds(self) -> int:
        return max(1, round(self.interval))

    @property
    def _attempts(self) -> int:
        return max(3, self.max_attempts)

    def apply(self, sock: socket.socket) -> None:
        """Set the options of a connected TCP socket."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self._attempts)
        # The kernel sends no probes while sent data is unacknowledged; this option limits that time.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.timeout * 1000)


def seconds_since_answer(sock: socket.socket) -> float:
    """Return the seconds since the peer's kernel last acknowledged data or a probe.

    Data that it sends counts as well, unless it owes an acknowledgement: it may not hear from this side then. While
    data arrives, this side sends no probes. OSError: the socket is closed.
    """
    data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    probes, unacknowledged, since_data, since_acknowledgement = _TCP_INFO.unpack(data)
    since = since_acknowledgement if probes or unacknowledged else min(since_data, since_acknowledgement)
    milliseconds: int = since
    return milliseconds / 1000
