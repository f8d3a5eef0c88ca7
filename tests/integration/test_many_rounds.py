"""A short `make soak ROUNDS=...`: nothing that the processes hold grows with the rounds."""

from __future__ import annotations

import pytest
from benchmarks import many_rounds
from benchmarks.many_rounds import Held, growth


def test_descriptors_threads_memory_and_files_do_not_grow_with_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert many_rounds.run(80, first=20, nodes=1, workers=2) == 0, capsys.readouterr().out


def test_what_grows_and_what_has_ended_is_named() -> None:
    first = {"agent 1": Held(10, 4, 20_000), "store 2": Held(9, 1, 9_000), "files": Held(0, 0, 0, 12)}
    last = {"agent 1": Held(70, 4, 40_000), "files": Held(0, 0, 0, 92)}
    agent, store, files = growth(first, last)
    assert agent.startswith("agent 1 holds more descriptors, memory: ")
    assert store == "store 2 has ended"
    assert files.startswith("files holds more files: ")
