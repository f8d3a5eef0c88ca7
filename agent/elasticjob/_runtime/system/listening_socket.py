"""Listening sockets on all addresses of this machine."""

from __future__ import annotations

import errno
import socket

ALL_ADDRESSES = "::"
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""The kernel was started without IPv6, or IPv6 is disabled for the interfaces."""


def listen_on_all_addresses(port: int, *, backlog: int) -> socket.socket:
    """Return a socket that accepts connections of IPv6 and IPv4; of IPv4 only where the machine has no IPv6.

    `port` 0 chooses a free one. OSError: the port is in use. The sysctl `net.ipv6.bindv6only` has no effect.
    """
    try:
        return _listen_on_both(port, backlog)
    except OSError as error:
        # Any other error, such as a port that is in use, must not end in a server that half of the peers do not reach.
        if error.errno not in _NO_IPV6:
            raise
    return socket.create_server(("0.0.0.0", port), backlog=backlog)  # noqa: S104


def _listen_on_both(port: int, backlog: int) -> socket.socket:
    # Not socket.create_server: it tells a system without IPv6 from other errors by a ValueError without a reason.
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
