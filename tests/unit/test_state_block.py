"""Blocks of training state: complete or absent, newest first, saved atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elasticjob.training import state_block
from elasticjob.training.state_block import ABSENT, HEADER_SIZE, NO_STEP, BlockHeader


def memory(step: int = NO_STEP, path: str | None = None, data: bytes = b"") -> int:
    descriptor = os.memfd_create("test")
    if step != NO_STEP:
        text = json.dumps({"path": path, "tree": {}}).encode()
        view = state_block.begin_write(descriptor, HEADER_SIZE + len(text) + len(data))
        view[HEADER_SIZE:] = text + data
        state_block.finish_write(descriptor, BlockHeader(step, len(text), len(view)))
    return descriptor


def test_a_block_is_absent_while_it_is_written() -> None:
    descriptor = memory(7)
    assert state_block.read_header(descriptor).step == 7
    state_block.begin_write(descriptor, 4096)
    assert state_block.read_header(descriptor) is ABSENT


@pytest.mark.parametrize("content", [b"", b"short", b"X" * 200, b"EJSTATE1" + b"\x01" * 24])
def test_other_content_is_no_block(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert state_block.read_file_header(str(tmp_path / "file")) is ABSENT
    assert state_block.read_file_header(str(tmp_path / "nowhere")) is ABSENT


def test_a_truncated_block_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert state_block.save_block(memory(7, data=b"x" * 1000), str(path))
    path.write_bytes(path.read_bytes()[:-1])
    assert state_block.read_file_header(str(path)) is ABSENT


@pytest.mark.parametrize(("steps", "index"), [((3, 4), 1), ((4, 3), 0), ((NO_STEP, 0), 1), ((NO_STEP, NO_STEP), 0)])
def test_the_newest_block_has_the_latest_step(steps: tuple[int, int], index: int) -> None:
    found, header = state_block.newest_block([memory(step) for step in steps])
    assert (found, header.step) == (index, max(steps))


def test_a_save_never_replaces_a_newer_state_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert state_block.save_block(memory(5, data=b"five"), path)
    assert not state_block.save_block(memory(5), path)
    assert not state_block.save_block(memory(4), path)
    assert state_block.save_block(memory(6), path)
    assert state_block.read_file_header(path).step == 6
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_failed_save_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "state")
    state_block.save_block(memory(5), path)

    def disk_full(*_: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "sendfile", disk_full)
    with pytest.raises(OSError, match="no space"):
        state_block.save_block(memory(6), path)
    assert state_block.read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_the_newest_block_is_saved_to_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert state_block.save_to_recorded_path([memory(5, path), memory(6, path)]) == path
    assert state_block.read_file_header(path).step == 6
    assert state_block.save_to_recorded_path([memory(5, path), memory(6, path)]) == ""
    assert state_block.save_to_recorded_path([memory(7, None), memory()]) == ""
    assert state_block.save_to_recorded_path([memory(), memory()]) == ""
