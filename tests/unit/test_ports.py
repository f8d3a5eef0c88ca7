"""Ports that tests choose for servers which they start later."""

from __future__ import annotations

import socket
from pathlib import Path

from support.common import ports
from support.common.ports import free_ports


def test_no_connection_takes_a_port_before_its_server_listens() -> None:
    lowest_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for count in (1, 3):
        found = free_ports(count)
        assert len(set(found)) == count
        assert all(ports.LOWEST <= port < lowest_of_connections for port in found)
        for port in found:
            socket.create_server(("127.0.0.1", port)).close()
