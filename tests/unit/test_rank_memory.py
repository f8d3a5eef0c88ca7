"""What each worker keeps for itself in the memory of its node."""

from __future__ import annotations

import os

import pytest

from elasticjob.training.replicated.live.rank_memory import RankMemory


def test_each_local_rank_has_its_own_newest_entry() -> None:
    descriptor = os.memfd_create("test")
    first, second = RankMemory(descriptor, 0), RankMemory(descriptor, 1)
    assert first.read() == ((-1, -1), b"")
    for number in range(1, 5):
        assert first.write((number, 10), b"first" * number)
        assert second.write((number, 20), b"second")
    assert RankMemory(descriptor, 0).read() == ((4, 10), b"first" * 4)
    assert RankMemory(descriptor, 1).read() == ((4, 20), b"second")
    assert RankMemory(descriptor, 0).read((3, 10)) == ((3, 10), b"first" * 3)
    assert RankMemory(descriptor, 0).read((1, 10)) == ((-1, -1), b"")


def test_the_entry_of_the_newest_complete_commit_stays_whatever_is_begun_after_it() -> None:
    memory = RankMemory(os.memfd_create("test"), 0)
    for number in range(1, 6):
        memory.write((number, number), b"x", protected=(2, 2))
    assert [memory.read((number, number))[0][0] for number in range(1, 6)] == [-1, 2, -1, 4, 5]


def test_an_entry_that_is_not_complete_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RankMemory(os.memfd_create("test"), 0)
    memory.write((1, 1), b"one")
    memory.write((2, 2), b"two")
    memory.write((3, 3), b"3")
    pwrite = os.pwrite

    def end_after_the_content(descriptor: int, content: bytes, offset: int) -> int:
        written = pwrite(descriptor, content, offset)
        if content == b"three":
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(os, "pwrite", end_after_the_content)
    with pytest.raises(KeyboardInterrupt):
        memory.write((4, 4), b"three")
    assert memory.read() == ((3, 3), b"3")
    assert memory.read((1, 1)) == ((-1, -1), b""), "its content has been replaced"


def test_too_large_content_is_refused() -> None:
    memory = RankMemory(os.memfd_create("test"), 0)
    assert not memory.write((1, 1), b"x" * (64 << 10))
    assert memory.read()[1] == b""
