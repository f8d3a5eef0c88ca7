"""The start of a store process."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.store_pod.main import count_container_start, store_limits


def test_container_starts_are_counted_in_the_state_directory(tmp_path: Path) -> None:
    starts = [count_container_start(tmp_path, 5.0), count_container_start(tmp_path, 6.0)]
    assert [*starts, count_container_start(None, 7.0)] == [0, 1, 0]


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"\xff\x00", b"9" * 5000])
def test_a_counter_that_was_cut_off_or_damaged_uses_no_number_twice(tmp_path: Path, content: bytes) -> None:
    assert [count_container_start(tmp_path, 1e9 + n) for n in range(3)] == [0, 1, 2]
    (tmp_path / "starts").write_bytes(content)
    assert [count_container_start(tmp_path, 1e9 + n) for n in (3, 4)] == [10**9 + 3, 10**9 + 4]


def test_the_counter_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_container_start(tmp_path, 0.0)

    def stop_here(descriptor: int) -> None:
        raise OSError("killed here")

    monkeypatch.setattr("os.fsync", stop_here)
    with pytest.raises(OSError, match="killed here"):
        count_container_start(tmp_path, 1.0)
    monkeypatch.undo()
    assert count_container_start(tmp_path, 2.0) == 1


def test_the_limits_of_a_store_follow_the_size_of_its_job_and_its_open_files() -> None:
    small, large = store_limits(RoundSettings(1, 2, 2), 1 << 20), store_limits(RoundSettings(1, 4000, 1, 96), 1 << 20)
    assert (small.connections, small.unauthenticated) == (16_384, 1024)
    assert (large.connections, large.unauthenticated) == (16_384, 8192)
    assert store_limits(RoundSettings(1, 2, 2), 4096).connections == 4096 - 256
