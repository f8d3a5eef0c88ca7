"""Listening sockets on all addresses of this host."""

from __future__ import annotations

import errno
import socket

ALL_ADDRESSES = "::"
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""The kernel was started without IPv6, or IPv6 is disabled for the interfaces."""


def listen_on_all_addresses(port: int, *, backlog: int) -> socket.socket:
    """Return a socket that accepts IPv6 and IPv4 connections, or only IPv4 if this host has no IPv6.

    `port` 0 chooses a free port. OSError: the port is in use. The sysctl `net.ipv6.bindv6only` has no effect.
    """
    try:
        return _listen_on_both(port, backlog)
    except OSError as error:
        # After any other error, such as a port that is in use, a server for IPv4 alone would be out of reach for half
        # of the peers.
        if error.errno not in _NO_IPV6:
            raise
    return socket.create_server(("0.0.0.0", port), backlog=backlog)  # noqa: S104


def _listen_on_both(port: int, backlog: int) -> socket.socket:
    # Not socket.create_server: if IPv6 is missing, it raises a ValueError without a reason instead of an OSError.
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((ALL_ADDRESSES, port))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{error.strerror} (port {port})") from None
    return sock
