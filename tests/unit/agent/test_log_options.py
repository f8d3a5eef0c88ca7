"""torchrun's log options: which output goes to the console, and which to files."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.reporting.log_options import STDERR, STDOUT, LogOptions, read_ranks, read_streams


@pytest.mark.parametrize(
    ("redirects", "tee", "ranks", "console", "files"),
    [
        ("0", "0", "", {(0, 1), (0, 2), (1, 1), (1, 2)}, set()),
        ("3", "0", "", set(), {(0, 1), (0, 2), (1, 1), (1, 2)}),
        ("1", "0", "", {(0, 2), (1, 2)}, {(0, 1), (1, 1)}),
        ("0", "3", "1", {(1, 1), (1, 2)}, {(0, 1), (0, 2), (1, 1), (1, 2)}),
        ("0:3", "1:2", "", {(1, 1), (1, 2)}, {(0, 1), (0, 2), (1, 2)}),
        ("3", "0:1", "", {(0, 1)}, {(0, 1), (0, 2), (1, 1), (1, 2)}),
    ],
)
def test_redirects_tee_and_the_filter_of_ranks(
    redirects: str, tee: str, ranks: str, console: set[tuple[int, int]], files: set[tuple[int, int]]
) -> None:
    logs = LogOptions("/l", read_streams(redirects), read_streams(tee), read_ranks(ranks), "${hostname}:${rank}: $x")
    every = [(rank, stream) for rank in (0, 1) for stream in (STDOUT, STDERR)]
    assert {worker for worker in every if logs.to_console(*worker)} == console
    assert {worker for worker in every if logs.to_file(*worker)} == files
    assert logs.line_prefix(role="r", local_rank=0, rank=3, hostname="n") == "n:3: $x"
