"""Blocks of training state: complete or absent, and ordered by their sequence numbers."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import ABSENT, NO_STEP, OLD_SEQUENCE, BlockHeader
from elasticjob._runtime.contract.snapshot_format.state_file import read_file_header, save_block
from support.training.state_blocks import memory


def test_a_block_is_absent_while_it_is_written() -> None:
    descriptor = memory(7)
    assert state_block.read_header(descriptor).step == 7
    state_block.begin_write(descriptor, 4096)
    assert state_block.read_header(descriptor) is ABSENT


@pytest.mark.parametrize(
    "content", [b"", b"short", b"X" * 200, b"EJSTATE1" + b"\x01" * 24, b"EJSTATE2" + b"\x01" * 32, b"EJSTATE3" * 9]
)
def test_other_content_is_no_block(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_file_header(str(tmp_path / "file")) is ABSENT
    assert read_file_header(str(tmp_path / "nowhere")) is ABSENT


def test_a_truncated_block_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert save_block(memory(7, data=b"x" * 1000), str(path))
    path.write_bytes(path.read_bytes()[:-1])
    assert read_file_header(str(path)) is ABSENT


@pytest.mark.parametrize(
    ("blocks", "index"),
    [
        pytest.param([(1, 3), (1, 4)], 1, id="one sequence number: the later step"),
        pytest.param([(2, 3), (1, 4)], 0, id="a rollback: the higher sequence number"),
        pytest.param([(1, 4), (2, 4)], 1, id="two commits at one step"),
        pytest.param([(1, NO_STEP), (1, 0)], 1, id="one is absent"),
        pytest.param([(9, NO_STEP), (0, 0)], 1, id="of the old format, and one is absent"),
        pytest.param([(1, NO_STEP), (1, NO_STEP)], 0, id="both are absent"),
    ],
)
def test_the_newest_block(blocks: list[tuple[int, int]], index: int) -> None:
    found, header = state_block.newest_block([memory(step, sequence=sequence) for sequence, step in blocks])
    assert (found, header.step) == (index, blocks[index][1])


def old_block(step: int) -> bytes:
    """Return a block as elasticjob 0.1.0 wrote it."""
    text = b'{"path": null, "tree": {"dict": [["objects", {"dict": []}], ["values", {"dict": [["step", 7]]}]]}}'
    header = struct.pack("=8sqqq", b"EJSTATE1", step, len(text), 64 + len(text))
    return header.ljust(64, b"\0") + text


def test_a_block_of_version_0_1_0_is_read() -> None:
    descriptor = os.memfd_create("test")
    content = old_block(7)
    os.write(descriptor, content)
    header, parsed, view = state_block.read_block(descriptor)
    assert header == BlockHeader(OLD_SEQUENCE, 7, len(content) - 64, len(content))
    assert parsed["tree"]["dict"][1] == ["values", {"dict": [["step", 7]]}]
    assert len(view) == len(content)


def test_any_new_block_replaces_a_block_of_version_0_1_0(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(old_block(1000))
    assert not save_block(memory(999, sequence=OLD_SEQUENCE), str(path))
    assert save_block(memory(5, sequence=1), str(path))
    assert read_file_header(str(path)).version == (1, 5)


def test_memory_stays_mapped_while_its_block_has_the_same_size() -> None:
    descriptor = memory(1)
    first = state_block.begin_write(descriptor, 4096)
    assert state_block.begin_write(descriptor, 4096, first) is first
    larger = state_block.begin_write(descriptor, 8192, first)
    assert len(larger) == 8192
    os.ftruncate(descriptor, 0)
    assert state_block.begin_write(descriptor, 8192, larger) is not larger  # its pages are gone
