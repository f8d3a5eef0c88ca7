"""The start of a store process."""

from __future__ import annotations

from pathlib import Path

from elasticjob.store_pod.main import count_container_start


def test_container_starts_are_counted_in_the_state_directory(tmp_path: Path) -> None:
    assert [count_container_start(tmp_path), count_container_start(tmp_path), count_container_start(None)] == [0, 1, 0]
