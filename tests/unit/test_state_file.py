"""The file of a training state: atomic, never an older state over a newer one, one writer at a time."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from elasticjob.training.blocks import state_file
from elasticjob.training.blocks.state_file import BlockChangedError, read_file_header, recorded_interval, save_block
from support.state_blocks import memory, write


def test_a_save_never_replaces_a_newer_state_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert save_block(memory(5, data=b"five"), path)
    assert not save_block(memory(5), path)
    assert not save_block(memory(4), path)
    assert save_block(memory(6), path)
    assert save_block(memory(2, sequence=2), path), "a rollback"
    assert read_file_header(path).version == (2, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_failed_save_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "state")
    save_block(memory(5), path)

    def disk_full(*_: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "sendfile", disk_full)
    with pytest.raises(OSError, match="no space"):
        save_block(memory(6), path)
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_the_newest_block_is_saved_to_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert state_file.save_to_recorded_path([memory(5, path), memory(6, path)]) == path
    assert read_file_header(path).step == 6
    assert state_file.save_to_recorded_path([memory(5, path), memory(6, path)]) == ""
    assert state_file.save_to_recorded_path([memory(7, None), memory()]) == ""
    assert state_file.save_to_recorded_path([memory(), memory()]) == ""


def test_a_block_that_is_overwritten_while_it_is_copied_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = str(tmp_path / "state"), os.sendfile
    save_block(memory(5), path)
    block = memory(6, data=b"a" * 1000)

    def commit_meanwhile(out: int, source: int, offset: int, count: int) -> int:
        sent = original(out, source, offset, count // 2 or count)
        write(block, 8, None, b"b" * 1000, sequence=2)
        return sent

    monkeypatch.setattr(os, "sendfile", commit_meanwhile)
    with pytest.raises(BlockChangedError):
        save_block(block, path)
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_of_several_nodes_one_writes_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = str(tmp_path / "state"), os.sendfile
    writes, others_wait, waiting = [], threading.Event(), []
    flock = fcntl.flock

    def counted_lock(file: Any, operation: int) -> None:
        waiting.append(operation)
        if len(waiting) == 3:
            others_wait.set()
        flock(file, operation)

    def counted(out: int, source: int, offset: int, count: int) -> int:
        others_wait.wait(20)
        writes.append(source)
        return original(out, source, offset, count)

    monkeypatch.setattr(os, "sendfile", counted)
    monkeypatch.setattr(fcntl, "flock", counted_lock)
    saved = []
    nodes = [threading.Thread(target=lambda: saved.append(save_block(memory(5), path))) for _ in range(3)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(20)
    assert (len(writes), sorted(saved)) == (1, [False, False, True])
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_without_locks_each_node_writes_its_own_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path, names, replace = str(tmp_path / "state"), [], os.replace

    def recorded(source: str, target: str) -> None:
        names.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    assert save_block(memory(5), path)
    assert names == [f"{path}.{os.uname().nodename}-{os.getpid()}.tmp"]
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_temporary_file_that_a_lost_node_left_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    (tmp_path / "state.tmp").write_bytes(b"x" * 100_000)
    assert save_block(memory(5), str(path))
    assert path.stat().st_size < 1000
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("more", "seconds"),
    [({}, 0.0), ({"save_minutes": 2}, 120.0), ({"save_minutes": "x"}, 0.0), ({"save_minutes": -1}, 0.0)],
)
def test_the_interval_that_a_block_asks_for(more: dict[str, object], seconds: float) -> None:
    assert recorded_interval([memory(1, **more), memory()]) == seconds  # type: ignore[arg-type]
    assert recorded_interval([memory(), memory()]) == 0.0
