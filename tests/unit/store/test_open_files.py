"""Open files and connections of a process with a store."""

from __future__ import annotations

import resource

import pytest

from elasticjob.store.open_files import connection_limit, raise_open_file_limit, too_few_open_files
from elasticjob.store.wire import Limits


def test_the_soft_limit_becomes_the_hard_one_and_the_old_limits_are_returned() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = (64, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, low)
        assert raise_open_file_limit() == low
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("workers", "nodes", "limit"),
    [(1, 1, Limits.connections), (8 * 1820, 1820, 64 * 14560 + 1820), (20_000, 2500, 1_282_500)],
)
def test_the_connection_limit_follows_the_size_of_the_round(workers: int, nodes: int, limit: int) -> None:
    assert connection_limit(workers, nodes) == limit


@pytest.mark.parametrize(
    ("hard", "line"),
    [
        (4096, "4500 connections or more, but this process may open only 4096 files"),
        (4501, ""),
        (resource.RLIM_INFINITY, ""),
    ],
)
def test_a_hard_limit_that_is_too_low_is_reported(hard: int, line: str) -> None:
    found = too_few_open_files((1024, hard), 4000, 500)
    assert line in found
    assert bool(found) == bool(line)
