"""Which interface received data, by counters as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob.training.network_counters import busiest_interface, received_bytes

DEVICES = """Inter-|   Receive            |  Transmit
 face |bytes    packets errs drop |bytes    packets errs drop
    lo: 1000      10    0    0     1000      10    0    0
  eth0:2000000      20    0    0      300       3    0    0
"""


def test_interfaces_and_infiniband_ports_are_read(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(DEVICES)
    for port, units in (("1", 100), ("2", 25)):
        counters = tmp_path / "infiniband/mlx5_0/ports" / port / "counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(f"{units}\n")
    assert received_bytes(tmp_path / "dev", tmp_path / "infiniband") == {"lo": 1000, "eth0": 2_000_000, "mlx5_0": 500}


def test_a_machine_without_counters_has_none(tmp_path: Path) -> None:
    assert received_bytes(tmp_path / "dev", tmp_path / "infiniband") == {}
    (tmp_path / "dev").write_text("\n\neth0: many\n")
    assert received_bytes(tmp_path / "dev", tmp_path / "infiniband") == {}


def test_this_machine_has_a_loopback_interface() -> None:
    assert "lo" in received_bytes()


@pytest.mark.parametrize(
    ("grown", "interface"),
    [
        ({"lo": 10, "eth0": 1000}, "eth0"),
        ({"lo": 10, "eth0": 499}, ""),
        ({"net1": 600, "eth0": 500}, "net1"),
        ({}, ""),
    ],
)
def test_the_interface_that_received_most_of_it_is_named(grown: dict[str, int], interface: str) -> None:
    before = dict.fromkeys(grown, 7)
    after = {name: 7 + count for name, count in grown.items()}
    assert busiest_interface(before, after, 1000) == interface


def test_an_interface_that_is_new_counts_from_0() -> None:
    assert busiest_interface({}, {"net1": 1000}, 1000) == "net1"
