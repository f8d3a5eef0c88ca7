"""Kernel TCP keep-alive, for control links and for plain clients of a store."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO = struct.Struct("=3xB20xI24x2I")
"""The fields tcpi_probes, tcpi_unacked, tcpi_last_data_recv and tcpi_last_ack_recv of Linux's `struct tcp_info`. The
two times are in milliseconds."""


@dataclass(frozen=True)
class KeepAlive:
    """Keep-alive settings: the kernel detects a vanished peer within `timeout` seconds."""

    interval: float = 1.0
    """Seconds between probes, rounded to whole seconds, at least 1."""
    max_attempts: int = 3
    """Probes without an answer after which the kernel closes the connection. Fewer than 3 count as 3, because
    `trusted_seconds` must be longer than one interval."""

    @property
    def timeout(self) -> int:
        """Seconds without an answer after which the kernel closes a connection."""
        return self._seconds * self._attempts

    @property
    def trusted_seconds(self) -> float:
        """Seconds after the peer's last answer for which this side may assume that the peer still holds the link.

        Each side sends a probe once an interval. Suppose that the network parts now. The peer may have had its last
        answer up to one interval ago, so it may close the link as early as `timeout` minus one interval from now. This
        side may have had its last answer just now, and must stop relying on the peer before the peer closes the link.
        A quarter of an interval is left for what this side does then.
        """
        return self.timeout - 1.25 * self._seconds

    @property
    def resend_window(self) -> float:
        """Seconds before the end of `trusted_seconds` at which this side sends data to a peer that has not answered.

        The answer to a probe is only that late if a packet was lost. The kernel sends the next probe one interval
        later, but it repeats lost data within about 0.2 s: a single lost probe must not look like a lost peer.
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

    Incoming data also proves that the peer is alive, and while it arrives the kernel sends no probes. It does not prove
    that the peer receives what we send, so it does not count while the peer owes us an acknowledgement. OSError: the
    socket is closed.
    """
    data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    probes, unacknowledged, since_data, since_acknowledgement = _TCP_INFO.unpack(data)
    since = since_acknowledgement if probes or unacknowledged else min(since_data, since_acknowledgement)
    milliseconds: int = since
    return milliseconds / 1000
