"""Which network interface of this host received data: by the kernel's counters, whatever library has used it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/proc/net/dev")
_INFINIBAND = Path("/sys/class/infiniband")
_INFINIBAND_UNIT = 4
"""Bytes that a port counts as one (InfiniBand Architecture Specification, PortRcvData)."""
_MIN_SHARE = 0.5
"""Share of the data that an interface must have received to be named. Shared memory has no interface."""


def received_bytes(devices: Path = _DEVICES, infiniband: Path = _INFINIBAND) -> dict[str, int]:
    """Return the bytes that each interface and InfiniBand port has received so far, by name; {} if unknown."""
    counters = {}
    with suppress(OSError, ValueError, IndexError):
        for line in devices.read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            counters[name.strip()] = int(numbers.split()[0])
    for counter in infiniband.glob("*/ports/*/counters/port_rcv_data"):
        with suppress(OSError, ValueError):
            counters[counter.parts[-5]] = counters.get(counter.parts[-5], 0) + _INFINIBAND_UNIT * int(
                counter.read_text()
            )
    return counters


def busiest_interface(before: Mapping[str, int], after: Mapping[str, int], size: int) -> str:
    """Return the interface that received most of `size` bytes between two readings; empty if none received half."""
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    busiest = max(grown, key=lambda name: grown[name], default="")
    return busiest if busiest and grown[busiest] >= _MIN_SHARE * size else ""
