"""Addresses and endpoints of both families as text."""

from __future__ import annotations

import pytest

from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text, is_loopback, plain_address, split_endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("store", ("store", "29400")),
        ("store:", ("store", "")),
        ("store:1", ("store", "1")),
        ("10.0.0.1:1", ("10.0.0.1", "1")),
        ("fd00::1", ("fd00::1", "29400")),
        ("[fd00::1]", ("fd00::1", "29400")),
        ("[fd00::1]:1", ("fd00::1", "1")),
        ("::1", ("::1", "29400")),
    ],
)
def test_host_and_port_of_an_endpoint(text: str, expected: tuple[str, str]) -> None:
    assert split_endpoint(text, "29400") == expected


@pytest.mark.parametrize("host", ["store", "10.0.0.1", "fd00::1"])
def test_an_endpoint_is_read_as_it_is_written(host: str) -> None:
    assert split_endpoint(endpoint_text(host, 7), "29400") == (host, "7")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:1:2", "::ffff:1:2"),
    ],
)
def test_an_address_has_one_form(host: str, expected: str) -> None:
    assert plain_address(host) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("fd00::1", False), ("host", False)],
)
def test_addresses_of_this_machine_only(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
