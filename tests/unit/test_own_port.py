"""The port of a local run's store."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob._runtime.local.processes import own_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_the_port_is_one_that_no_connection_gets() -> None:
    lowest = int(RANGE.read_text().split()[0])
    for _ in range(20):
        with own_port.listen_below_connections("127.0.0.1", 4) as listener:
            assert own_port.LOWEST <= listener.getsockname()[1] < lowest


@pytest.mark.parametrize("content", ["", "x y", "1024 65535"])
def test_without_such_a_port_any_will_do(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(content)
    monkeypatch.setattr(own_port, "PORT_RANGE", tmp_path / "range")
    with own_port.listen_below_connections("127.0.0.1", 4) as listener:
        assert listener.getsockname()[1] > 0
