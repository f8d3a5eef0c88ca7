"""Addresses in what members of a gloo group publish: bytes as two versions of torch write them."""

from __future__ import annotations

import socket
import struct

import pytest

from elasticjob.inprocess._groups.gloo_addresses import parse_address
from elasticjob.inprocess._groups.own_sockets import Address

NAME = struct.pack("=q", 2) + b"vm\x88\0\0\0\0\0\0\0"
"""What stands before the address: numbers and the host's name."""


def ipv4(host: str, port: int) -> bytes:
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)


def ipv6(host: str, port: int) -> bytes:
    address = socket.inet_pton(socket.AF_INET6, host)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + address + bytes(4)


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (NAME + ipv4("127.0.0.1", 45513) + bytes(112) + struct.pack("=qq", 1, 2), ("127.0.0.1", 45513)),
        (ipv4("10.0.3.7", 1024) + bytes(112) + struct.pack("=q", 0), ("10.0.3.7", 1024)),
        (NAME + ipv4("10.2.0.10", 522), ("10.2.0.10", 522)),
        (NAME + ipv6("fd00::7", 40000) + bytes(100), ("fd00::7", 40000)),
        (NAME + ipv6("::ffff:10.0.0.1", 40000) + bytes(100), ("10.0.0.1", 40000)),
        (NAME + ipv6("fd00::200:1:2:3", 40000) + bytes(100), ("fd00::200:1:2:3", 40000)),
        (b"", None),
        (bytes(200), None),
    ],
)
def test_the_address_of_a_member(published: bytes, expected: Address | None) -> None:
    assert parse_address(published) == expected
